"""The demo's users: each holds one conversation after the other, streaming, and times the first token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec

from router.demo.oracle import UnboundedCache
from router.demo.processes import PAGE_TOKENS, Fleet
from router.demo.stats import PhaseStats
from router.demo.workload import Conversation, User
from router.engine.options import TINY_MODEL
from router.hashing import TokenIds
from router.prompt.body import parse_body
from router.prompt.forms import CHAT, prompt_form
from router.prompt.local import local_ids
from router.prompt.models import ModelFacts, ModelSource, load_model

SHOW_EVERY_S = 0.25


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class Tokens:
    """Chat → ids as the engines make them, for the oracle."""

    def __init__(self) -> None:
        self._files = load_model(ModelSource(str(TINY_MODEL), "sglang"), _never)
        self._facts = ModelFacts("sglang", ("tiny",), str(TINY_MODEL))

    def of(self, body: bytes) -> TokenIds:
        request = parse_body(CHAT, body)
        return local_ids(request, prompt_form(request), self._files, self._facts)


def _never() -> Any:
    raise AssertionError("the shipped template reads no clock")


async def run_phase(fleet: Fleet, users: Sequence[User], stats: PhaseStats, show: Callable[[], None]) -> None:
    """Plays the whole schedule."""
    oracle, tokens = UnboundedCache(PAGE_TOKENS), Tokens()
    started_s = time.monotonic()
    tasks = [asyncio.create_task(_user(fleet, user, started_s, stats, oracle, tokens)) for user in users]
    try:
        while any(not task.done() for task in tasks):
            fleet.check()
            stats.ideal_hit_rate = oracle.hit_rate
            show()
            await asyncio.wait(tasks, timeout=SHOW_EVERY_S)
        for task in tasks:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
    stats.ideal_hit_rate = oracle.hit_rate


async def _user(
    fleet: Fleet, user: User, started_s: float, stats: PhaseStats, oracle: UnboundedCache, tokens: Tokens
) -> None:
    for conversation in user.conversations:
        await _talk(fleet, conversation, started_s, stats, oracle, tokens)


async def _talk(
    fleet: Fleet,
    conversation: Conversation,
    started_s: float,
    stats: PhaseStats,
    oracle: UnboundedCache,
    tokens: Tokens,
) -> None:
    messages: list[dict[str, str]] = [{"role": "system", "content": conversation.system}]
    continued_tokens = 0
    for turn in conversation.turns:
        await asyncio.sleep(max(0.0, started_s + turn.at_s - time.monotonic()))
        messages.append({"role": "user", "content": turn.message})
        body = msgspec.json.encode(
            {
                "model": "tiny",
                "messages": messages,
                "max_tokens": turn.max_tokens,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        oracle.request(tokens.of(body), continued_tokens)
        try:
            answer, usage = await _ask(fleet, body, stats)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            stats.errors += 1
            stats.first_error = stats.first_error or f"{type(error).__name__}: {error}"
            return
        messages.append({"role": "assistant", "content": answer})
        continued_tokens = usage.prompt_tokens
        if fleet.keeps_answers:
            continued_tokens += max(0, usage.completion_tokens - 1)  # the last sampled one is not kept


async def _ask(fleet: Fleet, body: bytes, stats: PhaseStats) -> tuple[str, _Usage]:
    """One streamed chat turn; returns the answer's text and usage. Raises ValueError for what is not a whole stream."""
    started, first, usage = time.monotonic(), None, None
    text: list[str] = []
    async with fleet.session.post(
        f"{fleet.base}/v1/chat/completions", data=body, headers={"Content-Type": "application/json"}
    ) as answer:
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {(await answer.text())[:200]}")
        done = False
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            if first is None:
                first = time.monotonic() - started
            if line.startswith(b"data: [DONE]"):
                done = True
                continue
            chunk = msgspec.json.decode(line[6:], type=_Chunk)
            text.extend(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage or usage
    if not done or first is None or usage is None:
        raise ValueError("the stream ended without [DONE] or usage")
    stats.requests += 1
    stats.ttft_s.append(first)
    stats.prompt_tokens += usage.prompt_tokens
    stats.cached_tokens += usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
    worker = answer.headers["x-kv-router-worker"]
    stats.per_worker[worker] = stats.per_worker.get(worker, 0) + 1
    return "".join(text), usage

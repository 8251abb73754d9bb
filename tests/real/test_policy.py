"""What routing is worth on two real SGLang servers: the same multi-turn load, KV-aware and round robin."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, quantiles

import aiohttp
import pytest

from tests.support.process import RouterProcess, router, wait_until

pytestmark = pytest.mark.real_engine

USERS, TURNS = 9, 5
SYSTEM_TOKENS, QUESTION_TOKENS, OUTPUT_TOKENS = 3000, 900, 8
SYSTEMS = 3
"""Prompts of up to 7,500 tokens: shorter ones are prefilled faster than a CPU server does anything else."""
ROUNDS = (("round_robin", 7), ("kv", 7), ("kv", 8), ("round_robin", 8))
"""(policy, seed): each policy goes first once, as the machine may be busier at one time than at another."""


@dataclass
class Seen:
    """What the clients saw of one policy."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_s: list[float] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.ttft_s += other.ttft_s

    @property
    def share(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    def line(self, name: str) -> str:
        p90 = quantiles(self.ttft_s, n=10)[-1]
        return (
            f"{name:20} cached {self.share:6.1%} of {self.prompt_tokens} prompt tokens, TTFT mean "
            f"{fmean(self.ttft_s) * 1000:.0f} ms, p90 {p90 * 1000:.0f} ms, {len(self.ttft_s)} requests"
        )


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 500) for _ in range(count)]


async def turn(session: aiohttp.ClientSession, base: str, prompt: Sequence[int], seen: Seen) -> None:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started, first_s, usage = time.perf_counter(), 0.0, None
    async with session.post(f"{base}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - started
                usage = json.loads(line[6:]).get("usage") or usage
    assert usage is not None
    seen.ttft_s.append(first_s)
    seen.prompt_tokens += usage["prompt_tokens"]
    seen.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def load(running: RouterProcess, seed: int) -> Seen:
    """USERS conversations under SYSTEMS system prompts, each TURNS turns long, thinking a moment in between."""
    seen = Seen()
    rng = random.Random(seed)
    systems = [ids(rng, SYSTEM_TOKENS) for _ in range(SYSTEMS)]

    async def user(number: int) -> None:
        own = random.Random(seed * 1000 + number)
        prompt = list(systems[number % SYSTEMS])
        await asyncio.sleep(own.uniform(0, 2))
        for _ in range(TURNS):
            prompt += ids(own, QUESTION_TOKENS)
            await turn(session, running.base, prompt, seen)
            await asyncio.sleep(own.uniform(0.2, 0.8))

    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        await asyncio.gather(*(user(number) for number in range(USERS)))
    return seen


def flushed(url: str) -> bool:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/flush_cache", method="POST"), timeout=30) as answer:
        return bool(answer.status == 200)


def flush(urls: Sequence[str]) -> None:
    """An engine refuses (400) while a request of the last load still ends."""
    for url in urls:
        wait_until(partial(flushed, url), 30, f"{url} flushed")


def settled(running: RouterProcess) -> bool:
    workers = running.workers()
    states = [rank["state"] for worker in workers for rank in worker["ranks"]]
    return [worker["state"] for worker in workers] == ["ready"] * 2 and states == ["live"] * 3


def test_kv_aware_routing_reuses_more_and_answers_sooner_than_round_robin_under_the_same_load(
    long_pair: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    total = {name: Seen() for name, _ in ROUNDS}
    for name, seed in ROUNDS:
        flush(long_pair)
        folder = tmp_path / f"{name}-{seed}"
        folder.mkdir()
        with router(folder, long_pair, policy={"name": name}) as running:
            wait_until(partial(settled, running), 90, "both workers ready, all three ranks live")
            seen = asyncio.run(load(running, seed))
        total[name].add(seen)
        with capsys.disabled():
            print("\n" + seen.line(f"{name}, seed {seed}"), end="", flush=True)
    with capsys.disabled():
        print(*("", *(total[name].line(f"{name}, all") for name in total)), sep="\n")
    kv, round_robin = total["kv"], total["round_robin"]
    assert kv.prompt_tokens == round_robin.prompt_tokens
    assert kv.share > round_robin.share + 0.08
    assert fmean(kv.ttft_s) < fmean(round_robin.ttft_s)

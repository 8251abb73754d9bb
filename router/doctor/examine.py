"""Runs the checks on live engines: the router's own fleet over them, wiretaps beside it, probes if asked."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import msgspec
import zmq.asyncio

from router.config import Config
from router.config.schema import TokenizerConfig
from router.doctor.findings import Diagnosis, Finding
from router.doctor.judge import Evidence, diagnose, split_findings
from router.doctor.probe import ProbeRefused, compare_ids, probe_worker
from router.doctor.wiretap import Heard, listen
from router.errors import RouterError
from router.fleet.ask import probe_session
from router.fleet.observer import NullObserver
from router.fleet.registry import Fleet
from router.fleet.worker import Worker
from router.index.prefix import PrefixIndex
from router.prompt.body import parse_body
from router.prompt.forms import CHAT
from router.prompt.models import ModelFacts
from router.prompt.source import PromptSource
from router.stream.sockets import new_context

log = logging.getLogger("router.doctor")

POLL_S = 0.05
PROBE_TIMEOUT_S = 60.0
MAX_ANSWER_BYTES = 4 * 1024 * 1024
SAMPLE_CHAT = {
    "messages": [
        {"role": "system", "content": "You check that two tokenizers agree. Été, 数字 12345, emoji 🙂."},
        {"role": "user", "content": "Do they?\n\n\tThey should:  spaces, tabs and lines included."},
        {"role": "assistant", "content": "They do."},
        {"role": "user", "content": "Good."},
    ]
}


async def examine(config: Config, *, seconds: float, probe: bool) -> list[Diagnosis]:
    """One diagnosis an engine of `config.workers`, in order. Listens for `seconds` after each described itself."""
    context = new_context()
    tap_context: zmq.asyncio.Context = zmq.asyncio.Context()
    session = probe_session()
    index = PrefixIndex()
    fleet = Fleet(
        config,
        index,
        context=context,
        session=session,
        clock=time.monotonic,
        wall_clock=time.time,
        rng=random.Random(),
        observer=NullObserver(),
    )
    try:
        fleet.start()
        await _described(fleet, seconds)
        together = split_findings(fleet.workers)
        jobs = [
            _one(worker, index, tap_context, config, seconds, probe, together.get(worker.url.text, ()))
            for worker in fleet.workers
        ]
        return list(await asyncio.gather(*jobs))
    finally:
        await fleet.close()
        await session.close()
        context.destroy(linger=0)
        tap_context.destroy(linger=0)


async def _described(fleet: Fleet, seconds: float) -> None:
    """Until every worker described itself and is healthy, or `seconds` are over."""
    until = time.monotonic() + seconds
    await _poll(lambda: all(worker.info is not None and worker.routable for worker in fleet.workers), until)


async def _one(
    worker: Worker,
    index: PrefixIndex,
    context: zmq.asyncio.Context,
    config: Config,
    seconds: float,
    probe: bool,
    split: Sequence[Finding],
) -> Diagnosis:
    if worker.info is None:
        return diagnose(worker, Evidence())
    until = time.monotonic() + seconds
    heard = {rank.number: Heard() for rank in worker.ranks}
    endpoints = worker.descriptor.ranks if worker.descriptor is not None else ()
    taps = [
        asyncio.create_task(listen(context, at.events, heard[at.rank])) for at in endpoints if at.events is not None
    ]
    evidence = Evidence(heard=heard, split=split)
    try:
        await _streams_up(worker, until)
        found, evidence.tokenizer_problem = await _prompts(worker, config, probe)
        if probe and worker.routable and worker.role == "plain":  # one half of a pair serves nobody
            found += await _probes(worker, index)
            evidence.probed = True
        evidence.probe_findings = tuple(found)
        await asyncio.sleep(max(0.0, until - time.monotonic()))
    finally:
        for tap in taps:
            tap.cancel()
        await asyncio.gather(*taps, return_exceptions=True)
    worker.watch()
    return diagnose(worker, evidence)


async def _streams_up(worker: Worker, until: float) -> None:
    await _poll(lambda: all(rank.state not in ("connecting", "replaying") for rank in worker.ranks), until)


async def _poll(seen: Callable[[], bool], until: float) -> None:
    while not seen() and time.monotonic() < until:  # noqa: ASYNC110 - the fleet has no event for each of its states
        await asyncio.sleep(POLL_S)


async def _probes(worker: Worker, index: PrefixIndex) -> list[Finding]:
    async with _probing_session() as session:

        async def ask(path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any]:
            answer: dict[str, Any] = msgspec.json.decode(
                await _post(session, worker, path, msgspec.json.encode(body), headers), type=dict[str, Any]
            )
            return answer

        try:
            return await probe_worker(worker, index, ask, random.Random())
        except msgspec.MsgspecError as error:
            return [Finding("error", "probe_refused", f"an answer is not JSON: {error}", "is this an LLM engine?")]


def _probing_session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    return aiohttp.ClientSession(timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar())


async def _post(
    session: aiohttp.ClientSession, worker: Worker, path: str, body: bytes, headers: dict[str, str]
) -> bytes:
    """The answer's body. Raises ProbeRefused for anything but a 200."""
    sent = {"Content-Type": "application/json", **headers}
    if worker.authorization is not None:
        sent["Authorization"] = worker.authorization
    try:
        async with session.post(worker.url.text + path, data=body, headers=sent, allow_redirects=False) as answer:
            read = await answer.content.read(MAX_ANSWER_BYTES)
            while more := await answer.content.read(MAX_ANSWER_BYTES):
                read += more
                if len(read) > MAX_ANSWER_BYTES:
                    raise ProbeRefused(f"{path} answered more than {MAX_ANSWER_BYTES} bytes")
            if answer.status != 200:
                raise ProbeRefused(f"{path} answered {answer.status}: {read[:200].decode('utf-8', 'replace')}")
            return read
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ProbeRefused(f"{path} was not answered: {type(error).__name__} {error}") from None


async def _prompts(worker: Worker, config: Config, probe: bool) -> tuple[list[Finding], str]:
    """Whether chats are tokenised here (else why not) and, when probing, whether the engine makes the same ids."""
    assert worker.info is not None
    facts = ModelFacts.from_server_info(worker.info)
    settings = config.tokenizer
    here = PromptSource(TokenizerConfig(path=settings.path, chat_template=settings.chat_template, mode="local"))
    async with _probing_session() as session:

        async def ask(model: ModelFacts, path: str, body: bytes) -> bytes:
            return await _post(session, worker, path, body, {})

        there = PromptSource(TokenizerConfig(mode="engine"), ask=ask)
        try:
            problem = await here.prepare(facts)
            if problem:
                return [], problem
            raw = msgspec.json.encode({"model": worker.models[0] if worker.models else "", **SAMPLE_CHAT})
            body = parse_body(CHAT, raw)
            local = await here.resolve(body, facts)
            if local.ids is None:
                return [], f"chat prompts cannot be rendered here ({local.reason})"
            if not probe:
                return [], ""
            engine = await there.resolve(body, facts)
            if engine.ids is None:
                what = f"the engine's tokenize route gave no ids ({engine.reason})"
                return [Finding("info", "tokenize", what, "chat prompts cannot be compared with it")], ""
            difference = compare_ids(local.ids, engine.ids)
            return ([difference] if difference is not None else []), ""
        except RouterError as error:
            return [], str(error)
        finally:
            await here.close()
            await there.close()

"""A whole router over simulated engines of every role, in the test's own event loop, on real loopback sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import zmq.asyncio

from router.engine.app import SimulatedEngine
from router.engine.options import TINY_MODEL, EngineOptions
from router.engine.text import TextCodec
from router.engine.timing import TimingProfile
from router.proxy.forward import Forwarder
from tests.e2e.conftest import Running, Start, context, fake_engine, start_router

FAST = TimingProfile(prefill_tokens_per_s=100_000.0, decode_step_s=0.001, step_overhead_s=0.0005)

Engine = Callable[..., Awaitable[SimulatedEngine]]


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    return TextCodec(TINY_MODEL)


@pytest.fixture
async def engine(codec: TextCodec) -> AsyncIterator[Engine]:
    """engine(role="prefill", dp_size=2, …) → a started simulated engine"""
    made: list[SimulatedEngine] = []
    context: zmq.asyncio.Context = zmq.asyncio.Context()

    async def start(**options: Any) -> SimulatedEngine:
        started = SimulatedEngine(EngineOptions(port=0, **{"timing": FAST, **options}), codec=codec, context=context)
        await started.start()
        made.append(started)
        return started

    yield start
    for one in made:
        await one.stop()
    context.destroy(linger=0)


class Split:
    """A split fleet and the router over it."""

    def __init__(self, prefill: list[SimulatedEngine], decode: list[SimulatedEngine], running: Running) -> None:
        self.prefill = prefill
        self.decode = decode
        self.running = running

    @property
    def engines(self) -> list[SimulatedEngine]:
        return [*self.prefill, *self.decode]

    def rooms(self) -> dict[str, int]:
        """Counts of all prefill engines together."""
        found = {"met": 0, "failed": 0, "reused": 0, "open": 0}
        for one in self.prefill:
            assert one.bootstrap is not None
            rooms = one.bootstrap.rooms
            counts = rooms.counts
            for name, count in (
                ("met", counts.met),
                ("failed", counts.failed),
                ("reused", counts.reused),
                ("open", len(rooms)),
            ):
                found[name] += count
        return found

    @property
    def legs(self) -> int:
        """Requests to prefill engines that have not ended."""
        forwarder = self.running.service.listener._forwarder
        assert isinstance(forwarder, Forwarder)
        return forwarder.prefill_legs

    def inflight(self) -> list[tuple[int, int]]:
        """(requests, tokens) of every rank that has any."""
        ranks = [rank for worker in self.running.service.fleet.workers for rank in worker.ranks]
        return [(r.account.requests, r.account.tokens) for r in ranks if r.account.requests or r.account.tokens]

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON and lower-case fields of a request to the public listener."""
        async with self.running.session.post(self.running.base + path, json=body, headers=headers) as answer:
            found = await answer.json(content_type=None)
            return answer.status, found, {name.lower(): value for name, value in answer.headers.items()}


MakeSplit = Callable[..., Awaitable[Split]]


@pytest.fixture
async def split(engine: Engine, start_router: Start) -> MakeSplit:
    """split(prefill=2, decode=3, prefill_options={…}, decode_options={…}, workers=[…], **router settings)"""

    async def make(
        prefill: int = 1,
        decode: int = 1,
        *,
        prefill_options: dict[str, Any] | None = None,
        decode_options: dict[str, Any] | None = None,
        workers: list[dict[str, Any]] | None = None,
        **settings: Any,
    ) -> Split:
        p = [await engine(role="prefill", **(prefill_options or {})) for _ in range(prefill)]
        d = [await engine(role="decode", **(decode_options or {})) for _ in range(decode)]
        own = [{"url": one.url} for one in (*p, *d)]
        fast = {"probe_interval_s": 0.3, "info_interval_s": 0.5}
        running = await start_router(*own, *(workers or []), **{"fleet": fast, **settings})
        made = Split(p, d, running)

        async def up() -> bool:
            states = [(w["state"], [r["state"] for r in w["ranks"]]) for w in await running.workers()]
            return all(state == "ready" and set(ranks) <= {"live", "off"} for state, ranks in states)

        await running.until(up, "every engine ready and every stream live")
        return made

    return make


__all__ = ["context", "fake_engine", "start_router"]

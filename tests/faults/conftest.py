"""The whole service against scripted engines, and the two ways a fault may end: truth, or no credit and a reason."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from router.fleet import doubt
from router.stream import sequence
from router.stream.replay import StreamLimits
from tests.e2e.conftest import Running, Start, context, fake_engine, start_router
from tests.support.cache import Cache, prompts
from tests.support.engine import FakeEngine
from tests.support.waiting import until
from tests.support.wire import Wire

FAST = {"probe_interval_s": 0.3, "probe_timeout_s": 1.5, "info_interval_s": 0.3, "unhealthy_after": 3}
USAGE = b'{"usage":{"prompt_tokens":41,"prompt_tokens_details":{"cached_tokens":0}}}'
MakeEngine = Callable[..., Awaitable[FakeEngine]]
QUICK = partial(StreamLimits, replay_quiet_s=0.3, replay_cooldown_s=0.3, unreachable_after_s=0.6, duplicate_calm_s=0.6)


@pytest.fixture(autouse=True)
def impatient_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits on waiting, shortened: how long they are is not what is tested here."""
    monkeypatch.setattr(sequence, "StreamLimits", QUICK)
    monkeypatch.setattr(doubt, "SILENT_AFTER_S", 0.3)


class Scene:
    """One router over one engine, with a cache a rank and prompts to ask for."""

    def __init__(self, router: Running, engine: FakeEngine, width: int) -> None:
        self.router = router
        self.engine = engine
        self.caches = [Cache(engine, rank, width=width) for rank in range(engine.dp_size)]
        self.prompts = prompts(1)

    @property
    def cache(self) -> Cache:
        return self.caches[0]

    async def worker(self) -> dict[str, Any]:
        (worker,) = await self.router.workers()
        return worker

    async def rank(self, number: int = 0) -> dict[str, Any]:
        rank: dict[str, Any] = (await self.worker())["ranks"][number]
        return rank

    async def credits(self, rank: int = 0, asked: Sequence[list[int]] | None = None) -> list[int]:
        return [await self.router.credit(p, self.engine.url, rank) for p in (asked or self.prompts)]

    async def exact(self, rank: int = 0, asked: Sequence[list[int]] | None = None, timeout_s: float = 8.0) -> None:
        """The rank becomes live and every credit is the cache's truth, twice in a row: it stays so."""
        cache, asked = self.caches[rank], asked or self.prompts
        seen, shown = 0, {}

        async def twice() -> bool:
            nonlocal seen, shown
            shown = await self.rank(rank)
            shown |= {"credited": await self.credits(rank, asked), "truth": [cache.truth(p) for p in asked]}
            seen = seen + 1 if shown["state"] == "live" and shown["credited"] == shown["truth"] else 0
            return seen == 2

        await until(twice, lambda: f"exact: {shown}", timeout_s, 0.02)

    async def subscribed(self, times: int, rank: int = 0) -> None:
        """The publisher has been subscribed to so often since it was opened, and the earlier ones are closed."""

        async def seen() -> bool:
            engine = self.engine
            return engine.subscriptions_ever(rank) >= times and engine.subscriptions(rank) == 1

        await self.router.until(seen, f"subscription {times} to rank {rank}", 15)

    async def state(self, state: str, words: str, rank: int = 0, timeout_s: float = 10.0) -> None:
        """The rank shows the state with these words in its reason, earns nothing, and still takes requests."""
        shown: dict[str, Any] = {}

        async def said() -> bool:
            nonlocal shown
            shown = await self.rank(rank)
            return shown["state"] == state and words in shown["reason"]

        await until(said, lambda: f"{state}, {words}: {shown}", timeout_s, 0.02)
        assert await self.credits(rank) == [0] * len(self.prompts)
        assert shown["trusted"] is False
        at = {"worker": self.engine.url, "rank": str(rank)}
        assert await self.router.metric("stream_state", state=state, **at) == 1
        assert await self.router.metric("stream_state", state="live", **at) == 0

    async def serve(self, count: int = 3) -> None:
        """Requests whose prompts were new to the engine, says its usage."""
        self.engine.bodies["/v1/completions"] = USAGE
        for prompt in prompts(time.monotonic_ns(), count):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1}
            async with self.router.session.post(f"{self.router.base}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()

    async def drift(self, kind: str, *words: str, timeout_s: float = 12.0) -> dict[str, Any]:
        """A drift item of that kind that says these words."""
        shown: list[dict[str, Any]] = []

        def fits(item: dict[str, Any]) -> bool:
            return item["kind"] == kind and all(word in f"{item['observed']} {item['advice']}" for word in words)

        async def found() -> dict[str, Any] | None:
            nonlocal shown
            shown = (await self.worker())["drift"]
            return next(filter(fits, shown), None)

        return dict(await until(found, lambda: f"{kind}, {words}: {shown}", timeout_s, 0.05))

    async def no_drift(self, timeout_s: float = 8.0) -> None:
        async def none() -> bool:
            return not (await self.worker())["drift"]

        await self.router.until(none, "no drift", timeout_s)


MakeScene = Callable[..., Awaitable[Scene]]


@pytest.fixture
async def scene(start_router: Start, fake_engine: MakeEngine) -> MakeScene:
    """scene(dp_size=…, block_size=…, replay=…, warm=True) → a live rank whose credits are exact"""

    async def make(*, warm: bool = True, settings: dict[str, Any] | None = None, **options: Any) -> Scene:
        engine = await fake_engine(**options)
        router = await start_router({"url": engine.url, **(settings or {})}, fleet=FAST)
        made = Scene(router, engine, engine.info["kv_events"]["block_size"])
        if warm:
            for cache in made.caches:
                await engine.listened(cache.rank)
                engine.restarted(cache.rank, 0)
                cache.clear()
                cache.store(*made.prompts[:3])
                cache.store(made.prompts[3])
            for cache in made.caches:
                await made.exact(cache.rank)
        return made

    return make


@pytest.fixture
async def wire() -> AsyncIterator[Callable[[int], Awaitable[Wire]]]:
    """wire(target port) → an open relay to it"""
    opened = []

    async def make(target: int) -> Wire:
        made = Wire(target)
        await made.open()
        opened.append(made)
        return made

    yield make
    for each in opened:
        each.resume()
        await each.close()


__all__ = ["Scene", "context", "fake_engine", "scene", "start_router", "wire"]

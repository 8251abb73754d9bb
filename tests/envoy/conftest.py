"""A whole router with its Envoy listeners, and scriptable engines, in the test's own event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import pytest

from tests.e2e.conftest import Running, Start, context, fake_engine, start_router
from tests.support.engine import FakeEngine

StartEngine = Callable[..., Awaitable[FakeEngine]]
Pickers = Callable[..., Awaitable[Running]]


@pytest.fixture
async def pickers(start_router: Start) -> Pickers:
    """pickers(engine, …, envoy={…}, api_keys=[…]) → a router that Envoy may ask, over both protocols unless said."""

    async def start(*engines: FakeEngine, envoy: Mapping[str, object] | None = None, **settings: object) -> Running:
        asked = {"ext_authz": {"port": 0}, "ext_proc": {"port": 0}} if envoy is None else dict(envoy)
        running = await start_router(*({"url": engine.url} for engine in engines), envoy=asked, **settings)
        for engine in engines:
            await running.live(engine.url, ranks=engine.dp_size)
        return running

    return start


__all__ = ["context", "fake_engine", "start_router"]

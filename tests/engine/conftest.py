"""A simulated engine on loopback, fast enough that tests do not wait for modelled time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import zmq.asyncio

from router.engine.app import SimulatedEngine
from router.engine.options import TINY_MODEL, EngineOptions
from router.engine.text import TextCodec
from tests.engine.support import TIMEOUT_S, Starter, Wire


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    return TextCodec(TINY_MODEL)


@pytest_asyncio.fixture
async def start(codec: TextCodec) -> AsyncIterator[Starter]:
    """`await start(page_size=4, …)` → a running engine on free ports, stopped after the test."""
    engines: list[SimulatedEngine] = []

    async def starter(**settings: Any) -> SimulatedEngine:
        settings = {"port": 0, "time_scale": 0.01, **settings}
        engine = SimulatedEngine(EngineOptions(**settings), codec=codec)
        await engine.start()
        engines.append(engine)
        return engine

    yield starter
    for engine in engines:
        await engine.stop()


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        yield session


@pytest_asyncio.fixture
async def wire() -> AsyncIterator[Wire]:
    context = zmq.asyncio.Context()
    wire = Wire(context)
    yield wire
    context.destroy(linger=0)

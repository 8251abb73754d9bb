from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import zmq

from router.config import Config, FleetConfig
from router.fleet.ask import probe_session
from router.fleet.observer import FleetObserver, NullObserver
from router.fleet.registry import Fleet
from router.index.prefix import PrefixIndex
from tests.fleet.helpers import FAST, MakeEngine, MakeFleet
from tests.support.engine import FakeEngine


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def make_engine(context: zmq.Context[zmq.Socket[bytes]]) -> AsyncIterator[MakeEngine]:
    """`await make_engine(dp_size=…, block_size=…, start=True)`"""
    engines = []

    async def make(*, start: bool = True, **options: Any) -> FakeEngine:
        engine = FakeEngine(context, **options)
        engines.append(engine)
        if start:
            await engine.start()
        return engine

    yield make
    for engine in engines:
        await engine.stop()


@pytest.fixture
async def make_fleet(context: zmq.Context[zmq.Socket[bytes]]) -> AsyncIterator[MakeFleet]:
    """`make_fleet(fleet=FleetConfig(…), worker_api_key=…, workers=…, observer=…, index=…)`: a started fleet."""
    fleets = []
    sessions = []

    def make(
        *,
        fleet: FleetConfig = FAST,
        observer: FleetObserver | None = None,
        index: PrefixIndex | None = None,
        **config: Any,
    ) -> Fleet:
        session = probe_session()
        sessions.append(session)
        made = Fleet(
            Config(fleet=fleet, **config),
            index or PrefixIndex(),
            context=context,
            session=session,
            clock=time.monotonic,
            wall_clock=time.time,
            rng=random.Random(7),
            observer=observer or NullObserver(),
        )
        fleets.append(made)
        made.start()
        return made

    yield make
    for made in fleets:
        await made.close()
    for session in sessions:
        await session.close()

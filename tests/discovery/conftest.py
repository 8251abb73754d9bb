from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import zmq

from router.config import Config, DiscoveryConfig, FleetConfig, KubernetesApiConfig, KubernetesConfig
from router.contract.url import WorkerUrl
from router.fleet.ask import probe_session
from router.fleet.discovery.run import Discovery
from router.fleet.observer import NullObserver
from router.fleet.registry import Fleet
from router.index.prefix import PrefixIndex
from tests.support.engine import FakeEngine
from tests.support.kube import FakeKube

FAST = FleetConfig(probe_interval_s=0.3, probe_timeout_s=1.5, info_interval_s=0.3, unhealthy_after=3)
Follow = Callable[..., Fleet]


class Seen:
    """What discovery told its observer."""

    def __init__(self) -> None:
        self.synced: list[tuple[str, int]] = []
        self.failures = 0

    def discovery_synced(self, source: str, workers: int) -> None:
        self.synced.append((source, workers))

    def discovery_failed(self, source: str) -> None:
        self.failures += 1


@pytest.fixture
async def kube() -> AsyncIterator[FakeKube]:
    made = await FakeKube().start()
    yield made
    await made.close()


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
async def engine(context: zmq.Context[zmq.Socket[bytes]]) -> AsyncIterator[Callable[[], Awaitable[FakeEngine]]]:
    """`await engine()`: a started scriptable engine on 127.0.0.1."""
    made = []

    async def start() -> FakeEngine:
        made.append(FakeEngine(context))
        await made[-1].start()
        return made[-1]

    yield start
    for each in made:
        await each.stop()


@pytest.fixture
async def make_fleet(context: zmq.Context[zmq.Socket[bytes]]) -> AsyncIterator[Callable[..., Fleet]]:
    """`make_fleet(**config)`: a started fleet."""
    fleets: list[Fleet] = []
    async with probe_session() as session:

        def make(**config: Any) -> Fleet:
            fleets.append(
                Fleet(
                    Config(fleet=FAST, **config),
                    PrefixIndex(),
                    context=context,
                    session=session,
                    clock=time.monotonic,
                    wall_clock=time.time,
                    rng=random.Random(7),
                    observer=NullObserver(),
                )
            )
            fleets[-1].start()
            return fleets[-1]

        yield make
        for fleet in fleets:
            await fleet.close()


@pytest.fixture
async def follow(kube: FakeKube, seen: Seen, make_fleet: Callable[..., Fleet]) -> AsyncIterator[Follow]:
    """`follow(fleet=…, relist_s=…, ports=…, …)`: a fleet that follows the stand-in's pods."""
    running: list[Discovery] = []

    def start(fleet: Fleet | None = None, **settings: Any) -> Fleet:
        fleet = fleet or make_fleet()
        settings = {"selector": "app=sglang", "namespace": "default", "ports": ("http",), **settings}
        api = KubernetesApiConfig(url=WorkerUrl.parse(kube.url), token_file=settings.pop("token_file", None))
        config = DiscoveryConfig(kubernetes=KubernetesConfig(api=api, **settings))
        running.append(Discovery(config, fleet, seen, rng=random.Random(3), environment={}))
        running[-1].start()
        return fleet

    yield start
    for each in running:
        await each.close()

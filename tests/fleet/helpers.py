"""What the fleet's tests share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from router.config import FleetConfig, WorkerConfig
from router.contract.url import WorkerUrl
from router.fleet.observer import NullObserver
from router.fleet.registry import Fleet
from tests.support.engine import FakeEngine
from tests.support.waiting import until

FAST = FleetConfig(probe_interval_s=0.3, probe_timeout_s=1.5, info_interval_s=0.3, unhealthy_after=3)

MakeEngine = Callable[..., Awaitable[FakeEngine]]
MakeFleet = Callable[..., Fleet]


def settings(url: str, **more: Any) -> WorkerConfig:
    return WorkerConfig(url=WorkerUrl.parse(url), **more)


class Recorder(NullObserver):
    def __init__(self) -> None:
        self.states: list[tuple[str, str]] = []
        self.removed: list[str] = []
        self.ranks_removed: list[int] = []

    def worker_state(self, worker: str, state: str) -> None:
        self.states.append((worker, state))

    def worker_removed(self, worker: str) -> None:
        self.removed.append(worker)

    def rank_removed(self, worker: str, rank: int) -> None:
        self.ranks_removed.append(rank)


def shown(fleet: Fleet) -> dict[str, Any]:
    """The only worker, as GET /workers shows it."""
    (worker,) = fleet.describe()
    return worker


async def ready(fleet: Fleet, incarnation: int = 1) -> dict[str, Any]:
    await until(
        lambda: all(w.routable and w.incarnation == incarnation for w in fleet.workers),
        f"incarnation {incarnation} ready; shown {fleet.describe()}",
    )
    return fleet.describe()[0]

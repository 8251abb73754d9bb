"""What the fleet's tests share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from router.config import FleetConfig, WorkerConfig
from router.contract.url import WorkerUrl
from router.fleet.registry import Fleet
from tests.support.engine import FakeEngine

FAST = FleetConfig(probe_interval_s=0.3, probe_timeout_s=1.5, info_interval_s=0.3, unhealthy_after=3)

MakeEngine = Callable[..., Awaitable[FakeEngine]]
MakeFleet = Callable[..., Fleet]


def settings(url: str, **more: Any) -> WorkerConfig:
    return WorkerConfig(url=WorkerUrl.parse(url), **more)

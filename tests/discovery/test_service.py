"""The whole router over discovered engines: a configuration, the stand-in API, real engines' sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.config import Overrides, build_config
from router.errors import ConfigError
from router.service import Service
from tests.support.engine import FakeEngine, stored
from tests.support.kube import FakeKube, pod
from tests.support.waiting import until

LOCAL = {"listen": {"host": "127.0.0.1", "port": 0}, "admin": {"host": "127.0.0.1", "port": 0}}
Serve = Callable[..., Awaitable[Service]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """`await serve(kubernetes={…})`: a started router with that discovery."""
    started: list[Service] = []

    async def start(**discovery: Any) -> Service:
        started.append(Service(build_config({**LOCAL, "discovery": discovery}, Overrides(), {}, Path())))
        await started[-1].start()
        return started[-1]

    yield start
    for service in started:
        await service.stop(0.0)


async def page(service: Service, path: str) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{service.admin_port}{path}") as answer,
    ):
        return await answer.text()


async def test_pods_that_come_are_routed_by_their_cache_and_pods_that_go_leave_nothing(
    serve: Serve, kube: FakeKube, engine: Callable[[], Awaitable[FakeEngine]]
) -> None:
    """Case 112 (llm-d#981): discovery that works shows in the credit, not only in the list."""
    cold, warm = await engine(), await engine()
    for name, one in (("cold", cold), ("warm", warm)):
        kube.put(pod(name, "127.0.0.1", ports={"http": one.port}))
    service = await serve(
        kubernetes={"selector": "app=sglang", "namespace": "default", "ports": ["http"], "api": {"url": kube.url}}
    )
    await until(service.core.ready, "ready")
    await until(lambda: len(service.fleet.routable("tiny")) == 2, "two workers")
    await warm.listened()
    warm.publish(stored([1, 2, 3], range(12), 4))
    holder = service.fleet.worker(warm.url)
    assert holder is not None
    await until(lambda: holder.ranks and sum(holder.ranks[0].blocks().values()) == 3, "three blocks")
    metrics = await page(service, "/metrics")
    assert 'kv_router_discovery_workers{source="kubernetes"} 2.0' in metrics
    assert "kv_router_discovery_synced_timestamp_seconds" in metrics
    assert '"identity":"pod default/warm uid uid-warm restarts 0"' in await page(service, "/workers")
    kube.delete("warm")
    await until(lambda: [w.url.text for w in service.fleet.workers] == [cold.url], "only the cold one")
    assert warm.url not in await page(service, "/metrics")


async def test_dns_names_are_looked_up(serve: Serve, engine: Callable[[], Awaitable[FakeEngine]]) -> None:
    one = await engine()
    service = await serve(dns={"names": ["localhost"], "ports": [one.port]})
    await until(service.core.ready, "ready")
    assert [worker.identity for worker in service.fleet.workers] == ["dns localhost"]


async def test_kubernetes_without_a_cluster_is_an_error_at_start(serve: Serve) -> None:
    with pytest.raises(ConfigError, match=r"discovery\.kubernetes\.api\.url: missing"):
        await serve(kubernetes={"selector": "app=sglang"})

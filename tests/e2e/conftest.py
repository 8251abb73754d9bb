"""A whole router in the test's own event loop: both listeners, real sockets, nothing faked inside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq

from router.config import Config, Overrides, build_config
from router.service import Service
from tests.support.engine import FakeEngine
from tests.support.waiting import until


class Running:
    """One started Service and a client for it."""

    def __init__(self, service: Service, session: aiohttp.ClientSession) -> None:
        self.service = service
        self.session = session
        self.base = f"http://127.0.0.1:{service.listener.port}"
        self.admin = f"http://127.0.0.1:{service.admin_port}"

    async def get(self, url: str) -> Any:
        async with self.session.get(url) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.get(f"{self.admin}/workers"))["workers"]
        return found

    async def ranks(self, url: str | None = None) -> list[dict[str, Any]]:
        return [r for w in await self.workers() if url in (None, w["url"]) for r in w["ranks"]]

    async def add(self, url: str, **settings: Any) -> int:
        async with self.session.post(f"{self.admin}/workers", json={"url": url, **settings}) as answer:
            status: int = answer.status
            return status

    async def remove(self, url: str) -> int:
        async with self.session.delete(f"{self.admin}/workers", params={"url": url}) as answer:
            status: int = answer.status
            return status

    async def route(self, path: str, **body: Any) -> dict[str, Any]:
        async with self.session.post(f"{self.admin}/route", json={"path": path, "body": body}) as answer:
            assert answer.status == 200, await answer.text()
            decision: dict[str, Any] = await answer.json()
            return decision

    async def credit(self, prompt: list[int], url: str, rank: int = 0, **body: Any) -> int:
        """Cached tokens credited to one rank for a token-id prompt, all tiers."""
        decision = await self.route("/v1/completions", **{"model": "tiny", "prompt": prompt, **body})
        found = [c for c in decision["candidates"] if (c["worker"], c["rank"]) == (url, rank)]
        assert len(found) == 1, decision
        tokens: int = max(found[0]["cached_tokens"].values())
        return tokens

    async def until(self, seen: Callable[[], Awaitable[Any]], what: str, timeout_s: float = 8.0) -> None:
        await until(seen, what, timeout_s)

    async def live(self, url: str, ranks: int = 1) -> None:
        async def seen() -> bool:
            return [r["state"] for r in await self.ranks(url)] == ["live"] * ranks

        await self.until(seen, f"{ranks} live ranks on {url}")

    async def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of kv_router_<name> that carry these labels."""
        async with self.session.get(f"{self.admin}/metrics") as answer:
            page = await answer.text()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        lines = [line for line in page.splitlines() if line.startswith((f"kv_router_{name} ", f"kv_router_{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in wanted))


def config(*workers: dict[str, Any], **settings: Any) -> Config:
    document = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"host": "127.0.0.1", "port": 0, "expose_routing_headers": True},
        "workers": list(workers),
        **settings,
    }
    return build_config(document, Overrides(), {}, Path())


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_router() -> AsyncIterator[Start]:
    """start_router({"url": …}, …, policy={…}) → Running"""
    started: list[Service] = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:

        async def start(*workers: dict[str, Any], **settings: Any) -> Running:
            service = Service(config(*workers, **settings))
            started.append(service)
            await service.start()
            return Running(service, session)

        yield start
        for service in started:
            await service.stop(0.0)


@pytest.fixture
async def context() -> AsyncIterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
async def fake_engine(context: zmq.Context[zmq.Socket[bytes]]) -> AsyncIterator[Callable[..., Awaitable[FakeEngine]]]:
    """fake_engine(dp_size=…, block_size=…) → a started scriptable engine"""
    made: list[FakeEngine] = []

    async def start(**settings: Any) -> FakeEngine:
        engine = FakeEngine(context, **settings)
        made.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in made:
        await engine.stop()


__all__ = ["Running", "config"]

"""A Core that places by turns, and remembers every placement and record."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from router.errors import RouterError
from router.proxy.plan import Fault, NoRoom, Origin, Outcome, RequestRecord, Unplanned, Usage
from router.proxy.server import ListenerOptions, PublicListener
from router.proxy.upstream import UpstreamClient, UpstreamLimits
from tests.support.http import HOST, ScriptedWorker


@dataclass(frozen=True)
class Url:
    host: str
    port: int
    scheme: str = "http"

    @property
    def text(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


@dataclass
class FakePlacement:
    url: Origin
    body: bytes
    authorization: bytes | None = None
    headers: Sequence[tuple[bytes, bytes]] = ()
    route_headers: Sequence[tuple[bytes, bytes]] = ()
    pair: None = None
    first_bytes: int = 0
    ends: list[tuple[Outcome, Fault | None, int | None, Usage | None]] = field(default_factory=list)

    @property
    def to_avoid(self) -> tuple[str, ...]:
        return (self.url.text,)

    def first_byte(self) -> None:
        self.first_bytes += 1

    def finish(
        self, outcome: Outcome, *, fault: Fault | None = None, status: int | None = None, usage: Usage | None = None
    ) -> None:
        self.ends.append((outcome, fault, status, usage))


class FakeCore:
    at_once = True
    """Planning waits for nothing."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.urls = [Url(HOST, port) for port in ports]
        self.placements: list[FakePlacement] = []
        self.records: list[RequestRecord] = []
        self.refusal: Exception | None = None
        self.authorization: bytes | None = None
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        self.route_headers: Sequence[tuple[bytes, bytes]] = ()
        self.is_ready = True
        self.planned: list[tuple[str, bytes]] = []
        self.limit: int | None = None
        """Placements in flight on each worker."""

    async def plan(
        self,
        route: str,
        headers: Mapping[str, str],
        body: bytes,
        request_id: str,
        unplanned: Unplanned | None = None,
    ) -> bytes:
        self.planned.append((route, body))
        if self.refusal is not None:
            raise self.refusal
        return body

    def plan_now(self, route: str, headers: Mapping[str, str], body: bytes, request_id: str) -> bytes | Unplanned:
        if not self.at_once:
            return Unplanned()
        self.planned.append((route, body))
        if self.refusal is not None:
            raise self.refusal
        return body

    def place(self, plan: bytes, tried: frozenset[str]) -> FakePlacement:
        left = [url for url in self.urls if url.text not in tried]
        for url in left:
            if self.limit is None or sum(p.url is url and not p.ends for p in self.placements) < self.limit:
                placement = FakePlacement(url, plan, self.authorization, self.headers, self.route_headers)
                self.placements.append(placement)
                return placement
        if left:
            raise NoRoom()
        raise RouterError("no_worker", "no worker can take the request", retry_after_s=2)

    def pool(self, plan: bytes) -> Hashable:
        return plan

    def request_done(self, record: RequestRecord) -> None:
        self.records.append(record)

    def models(self) -> bytes:
        return b'{"object":"list","data":[]}'

    def ready(self) -> bool:
        return self.is_ready

    def not_ready(self) -> RouterError:
        return RouterError("no_worker", "no worker can take a request now", retry_after_s=1)

    async def metrics(self) -> bytes:
        return b"kv_router_up 1\n"

    @property
    def unfinished(self) -> list[FakePlacement]:
        return [placement for placement in self.placements if len(placement.ends) != 1]

    @property
    def outcomes(self) -> list[Outcome]:
        return [record.outcome for record in self.records]


@dataclass
class Bench:
    """A listener in front of scripted workers."""

    core: FakeCore
    upstream: UpstreamClient
    listener: PublicListener[bytes]
    workers: list[ScriptedWorker]

    @property
    def port(self) -> int:
        return self.listener.port

    @property
    def worker(self) -> ScriptedWorker:
        return self.workers[0]


class Ways:
    """The ways a request can go: with and without waiting for its plan, for a connection to its worker."""

    pooled = 0
    """Connections to the first worker that are there beforehand."""


@pytest.fixture(params=["fresh", "pooled", "awaited"])
def every_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds of a request holds whichever way it goes."""
    monkeypatch.setattr(Ways, "pooled", 0 if request.param == "fresh" else 1)
    monkeypatch.setattr(FakeCore, "at_once", request.param != "awaited")


@pytest.fixture
def unpooled(every_way: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is about making connections."""
    monkeypatch.setattr(Ways, "pooled", 0)


@asynccontextmanager
async def bench(
    workers: int = 1,
    options: ListenerOptions | None = None,
    limits: UpstreamLimits | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[Bench]:
    """Everything on free loopback ports; afterwards no placement may be left open and no connection leaked."""
    scripted = [await ScriptedWorker().start() for _ in range(workers)]
    core = FakeCore([worker.port for worker in scripted])
    upstream = UpstreamClient(limits or UpstreamLimits(connect_s=2, idle_s=30), tls=tls)
    listener = PublicListener(core, upstream, options or ListenerOptions(port=0))
    await listener.start()
    made = Bench(core, upstream, listener, scripted)
    for url in core.urls[:1] * Ways.pooled:
        connection = await upstream._connect(url)
        connection._on_idle(connection)
    try:
        yield made
    finally:
        await listener.close(0.0)
        await upstream.close()
        for worker in scripted:
            await worker.close()
    assert core.unfinished == []
    assert listener.in_flight == 0
    assert upstream.open_connections == 0

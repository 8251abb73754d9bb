"""The public listener: admits a request, reads its body within limits, then forwards it or answers it itself."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from router.errors import RouterError
from router.proxy import routes
from router.proxy.downstream import Answer, ClientConnection
from router.proxy.forward import Client, Forwarder, Incoming, Story
from router.proxy.headers import ClientKeys, forwardable, request_id
from router.proxy.plan import UNMATCHED, Core, Outcome, RequestRecord
from router.proxy.queue import NOBODY_WAITS, QueueOptions
from router.proxy.request import BodyBudget, Request, RequestFields, RequestParser
from router.proxy.upstream import UpstreamClient

log = logging.getLogger("router.proxy")

P = TypeVar("P")

_KEEP_ALIVE_S = 120.0
"""Longer than clients' and balancers' pools (openai 5 s, nginx 60 s), so that they, not we, end an idle connection."""
_SWEEP_S = 1.0
_CUT_S = 1.0
_LOOK_S = 0.02
"""How often a router that ends looks whether its clients have taken their answers."""


@dataclass(frozen=True, slots=True)
class ListenerOptions:
    """Seconds and bytes. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8080
    max_body_bytes: int = 64 << 20
    max_buffered_bytes: int = 1 << 30
    """All request bodies held at a time, from their first byte to the end of the answer (case 78)."""
    head_s: float = 30.0
    """From a request's first byte (or the connection's start) to the end of its head."""
    body_s: float = 120.0
    """From the end of the head to the end of the body; no worker is chosen before."""
    stall_s: float = 300.0
    """A client that takes none of its answer for this long is cut off."""
    max_connections: int = 16384
    api_keys: tuple[str, ...] = ()
    forward_authorization: bool = False
    metrics: bool = True
    tls: ssl.SSLContext | None = None
    reuse_port: bool = False
    queue: QueueOptions = NOBODY_WAITS
    own_routes: bool = True
    """False: only what is forwarded is served here, no health, models or metrics."""
    priority_header: str | None = None
    """Name of a trusted field with an integer; requests with a larger one wait less."""


class Carrier(Protocol):
    """What a complete, admitted request is given to: router.proxy.forward.Forwarder, or one that answers it itself."""

    @property
    def waiting(self) -> int: ...

    async def forward(self, incoming: Incoming, client: Client, story: Story) -> None: ...


class PublicListener(Generic[P]):
    """`start`, then `leave` (say so, still serve) and `close` (finish, then cut) when the router ends."""

    def __init__(
        self,
        core: Core[P],
        upstream: UpstreamClient,
        options: ListenerOptions,
        *,
        carrier: Carrier | None = None,
        bodies: BodyBudget | None = None,
    ) -> None:
        """`carrier`: who answers instead of a worker. `bodies`: another listener's, to be shared."""
        self._core = core
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._forwarder: Carrier = carrier or Forwarder(core, upstream, options.queue, clock=self._loop.time)
        self._keys = ClientKeys(options.api_keys)
        self.bodies = bodies or BodyBudget(options.max_buffered_bytes)
        self._connections: set[ClientConnection] = set()
        self._emptied: asyncio.Future[None] | None = None
        self._listening: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._leaving = False
        self._draining = False
        self._cutting = False
        self._in_flight = 0
        self._quiet: asyncio.Future[None] | None = None

    @property
    def in_flight(self) -> int:
        """Requests whose head arrived and whose answer is not complete."""
        return self._in_flight

    @property
    def connections(self) -> int:
        """Client connections that are open."""
        return len(self._connections)

    @property
    def waiting(self) -> int:
        """Requests that wait for room on a worker."""
        return self._forwarder.waiting

    @property
    def buffered_bytes(self) -> int:
        """Request bodies held now."""
        return self.bodies.held

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        assert self._listening is not None
        return int(self._listening.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Bind and listen. Raises OSError when the address cannot be had."""
        options = self._options
        self._listening = await self._loop.create_server(
            self._accept,
            options.host,
            options.port,
            ssl=options.tls,
            backlog=1024,
            reuse_port=options.reuse_port or None,
        )
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    def set_api_keys(self, keys: Iterable[str]) -> None:
        """Replace the client keys for requests that arrive from now on."""
        self._keys = ClientKeys(keys)

    def leave(self) -> None:
        """Not ready any more: /ready answers 503 and connections end with their next answer. Requests are served."""
        self._leaving = True

    async def close(self, drain_s: float) -> None:
        """Take no connection and no request any more, wait up to `drain_s` for those in flight and for slow clients to
        take the rest of their answers, then cut them."""
        self._leaving = self._draining = True
        ends_s = self._loop.time() + drain_s
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._connections):
            if not connection.busy:
                connection.close()
        if self._in_flight:
            self._quiet = self._loop.create_future()
            await asyncio.wait((self._quiet,), timeout=drain_s)
        while self._loop.time() < ends_s and any(connection.unsent_bytes for connection in self._connections):
            await self._gone(_LOOK_S)
        self._cutting = True
        tasks = [connection.task for connection in self._connections if connection.task is not None]
        for connection in list(self._connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self._gone(_CUT_S, *tasks)
        if self._sweeper is not None:
            self._sweeper.cancel()

    async def _gone(self, timeout_s: float, *tasks: asyncio.Task[None]) -> None:
        """Until every connection has ended, and `tasks` have."""
        if self._connections:
            self._emptied = self._loop.create_future()
            await asyncio.wait((self._emptied, *tasks), timeout=timeout_s)

    def _accept(self) -> ClientConnection:
        parser = RequestParser(self._options.max_body_bytes, self.bodies)
        return ClientConnection(self._loop, parser, self._handle, self._made, self._lost)

    def _made(self, connection: ClientConnection) -> bool:
        self._connections.add(connection)
        return len(self._connections) <= self._options.max_connections and not self._draining

    def _lost(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        if self._emptied is not None and not self._connections and not self._emptied.done():
            self._emptied.set_result(None)

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in list(self._connections):
            connection.sweep(now, self._options.head_s, self._options.stall_s, _KEEP_ALIVE_S)
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    # --- one request

    async def _handle(self, connection: ClientConnection, request: Request) -> bool:
        """Answers one request. False: the connection has to end. Raises CancelledError when the client has gone."""
        self._in_flight += 1
        started = self._loop.time()
        story = Story()
        answer = Answer(connection, request, request_id(request.fields.all(b"x-request-id")))
        if self._leaving:
            answer.close_after()
        route = UNMATCHED
        try:
            if request.refused and request.failure is not None:
                raise request.failure
            target = routes.origin_form(request.target)
            route = routes.route_of(target)
            await self._serve(connection, request, route, target, answer, story)
        except RouterError as error:
            if error.code == "bad_request" and route == UNMATCHED:
                answer.close_after()  # an odd target (CONNECT's too): what follows may not be a request
            if not request.complete and request.fields.raw_value(b"expect") is not None:
                answer.close_after()  # the body may come or not
            _refuse(answer, story, error)
        except asyncio.CancelledError:
            if self._cutting:
                story.outcome = Outcome.STREAM_ERROR if story.answered else Outcome.UPSTREAM_ERROR
            raise
        except Exception:
            log.exception("request %s on %s failed", answer.request_id, route)
            _refuse(answer, story, RouterError("internal", "the router failed; its log says more"))
        finally:
            self._in_flight -= 1
            if self._quiet is not None and not self._in_flight and not self._quiet.done():
                self._quiet.set_result(None)
            self._report(self._record(request, route, answer, story, started))
        return answer.keep and not self._leaving

    async def _serve(
        self, connection: ClientConnection, request: Request, route: str, target: str, answer: Answer, story: Story
    ) -> None:
        fields = request.fields
        if (fields.raw_value(b"upgrade") or b"").lower() == b"websocket":
            answer.close_after()
            raise RouterError("not_implemented", "WebSocket is not proxied")
        if (route == routes.METRICS and not self._options.metrics) or (
            route in routes.OWN and not self._options.own_routes
        ):
            raise RouterError("not_found", "no such route on this listener")
        routes.check(request.method, route)
        keys = self._keys
        if route not in routes.KEYLESS and not keys.admit(fields):
            raise RouterError("unauthorized", "a client key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        if route in routes.OWN:
            await self._answer_own(route, answer, story)
            return
        if self._draining:
            answer.close_after()
            raise RouterError("draining", "this router is shutting down", retry_after_s=1)
        body = await self._read_body(connection, request, answer)
        kept = forwardable(fields.raw, keys, forward_authorization=self._options.forward_authorization)
        priority = self._priority(fields) if self._options.priority_header is not None else 0
        incoming = Incoming(route, target.encode("ascii"), fields, kept, body, answer.request_id, priority)
        await self._forwarder.forward(incoming, answer, story)

    def _priority(self, fields: RequestFields) -> int:
        """What the trusted field says; 0 for no integer."""
        try:
            return int(fields.get(self._options.priority_header or "", "0")[:10])
        except ValueError:
            return 0

    async def _answer_own(self, route: str, answer: Answer, story: Story) -> None:
        status, content_type = 200, b"application/json"
        if route == routes.HEALTH:
            body = b'{"status":"alive"}'
        elif route == routes.MODELS:
            body = self._core.models()
        elif route == routes.METRICS:
            content_type = b"text/plain; version=0.0.4; charset=utf-8"
            body = await self._core.metrics()
        elif self._leaving:
            raise RouterError("no_worker", "no worker can take a request now", retry_after_s=1)
        elif self._core.ready():
            body = b'{"status":"ready"}'
        else:
            raise self._core.not_ready()
        answer.whole(status, content_type, body)
        story.status, story.outcome = status, Outcome.OK

    async def _read_body(self, connection: ClientConnection, request: Request, answer: Answer) -> bytes:
        """The whole body, as sent (compressed stays compressed). Raises RouterError."""
        expect = request.fields.raw_value(b"expect")
        if expect is not None and expect.strip().lower() != b"100-continue":
            raise RouterError("expectation_failed", "the only expectation that can be met is 100-continue")
        if not request.complete and request.failure is None:
            if expect is not None and not request.body_begun and connection.transport is not None:
                connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            ended = self._loop.create_future()
            request.changed = lambda: None if ended.done() else ended.set_result(None)
            try:
                async with asyncio.timeout(self._options.body_s):
                    await ended
            except TimeoutError:
                answer.close_after()
                text = f"the body did not arrive within {self._options.body_s:g} s"
                raise RouterError("request_timeout", text) from None
        if request.failure is not None:
            answer.close_after()
            raise request.failure
        return request.body()

    def _report(self, record: RequestRecord) -> None:
        try:
            self._core.request_done(record)
        except Exception:  # the client has its answer already
            log.exception("request %s could not be recorded", record.request_id)

    def _record(self, request: Request, route: str, answer: Answer, story: Story, started: float) -> RequestRecord:
        return RequestRecord(
            request_id=answer.request_id,
            method=request.method,
            route=route,
            outcome=story.outcome,
            status=story.status,
            error=story.error,
            worker=story.worker,
            attempts=story.attempts,
            duration_s=self._loop.time() - started,
            ttft_s=None if story.first_byte_at is None else story.first_byte_at - started,
            usage=story.usage,
            queued_s=story.queued_s,
        )


def _refuse(answer: Answer, story: Story, error: RouterError) -> None:
    """Answer with our own error, or cut the connection when a worker's answer has begun already."""
    internal = error.status in (500, 502, 504)
    if answer.begun:
        answer.abort()
        story.outcome = Outcome.STREAM_ERROR
        return
    fields = [(b"Allow", error.allow.value.encode())] if isinstance(error, routes.MethodNotAllowed) else None
    if error.code == "unauthorized":
        fields = [(b"WWW-Authenticate", b"Bearer")]
    answer.error(error, fields)
    story.status, story.error = error.status, error.code
    story.outcome = Outcome.UPSTREAM_ERROR if internal else Outcome.REJECTED

"""The public listener: admits a request, reads its body within limits, then forwards it or answers it itself."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from router.errors import RouterError
from router.proxy import routes
from router.proxy.attempt import Client, Incoming, Story
from router.proxy.downstream import Answer, ClientConnection
from router.proxy.forward import Forwarder, Started
from router.proxy.headers import ClientKeys, Screened, forwardable, request_id
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
        self._turn = upstream.turn
        self._forwarder: Forwarder[P] | None = None
        if carrier is None:
            carrier = self._forwarder = Forwarder(core, upstream, options.queue, clock=self._loop.time)
        self._carrier: Carrier = carrier
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
        return self._carrier.waiting

    @property
    def buffered_bytes(self) -> int:
        """Request bodies held now."""
        return self.bodies.held

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        listening: Any = self._listening  # uvloop's is of another class, and its sockets are a list
        return int(listening.sockets[0].getsockname()[1])

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
        exchanges = [connection.exchange for connection in self._connections]
        tasks = [exchange.task for exchange in exchanges if exchange is not None and exchange.task is not None]
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
        return ClientConnection(self._turn, parser, self._begin, self._made, self._lost)

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

    def _begin(self, connection: ClientConnection, request: Request) -> None:
        """Answers one request, in as many turns as it takes."""
        self._in_flight += 1
        identity = request_id(request.fields.all(b"x-request-id"))
        exchange = ClientExchange(self, connection, request, identity, self._loop.time())
        connection.exchange = exchange
        if self._leaving:
            exchange.close_after()
        try:
            known = request.known
            screened = known.screened if known is not None else None
            if screened is not None and screened.keys is self._keys and not self._draining:
                exchange.screened = screened  # `_admit` would find out the same again
                exchange.route = screened.route
                self._want_body(exchange, request)
            else:
                self._admit(exchange, request)
        except Exception as error:
            self.refused(exchange, error)

    def _admit(self, exchange: ClientExchange[P], request: Request) -> None:
        """All that can be said of a request by its head. Raises RouterError."""
        if request.refused and request.failure is not None:
            raise request.failure
        exchange.route = route = routes.route_of(routes.origin_form(request.target))
        fields = request.fields
        if (fields.raw_value(b"upgrade") or b"").lower() == b"websocket":
            exchange.close_after()
            raise RouterError("not_implemented", "WebSocket is not proxied")
        if (route == routes.METRICS and not self._options.metrics) or (
            route in routes.OWN and not self._options.own_routes
        ):
            raise RouterError("not_found", "no such route on this listener")
        routes.check(request.method, route)
        exchange.keys = keys = self._keys
        if route not in routes.KEYLESS and not keys.admit(fields):
            raise RouterError("unauthorized", "a client key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        if route in routes.OWN:
            self._answer_own(exchange, route)
            return
        if self._draining:
            exchange.close_after()
            raise RouterError("draining", "this router is shutting down", retry_after_s=1)
        self._want_body(exchange, request)

    def _want_body(self, exchange: ClientExchange[P], request: Request) -> None:
        """`_forward` follows, at once or when all of the body is there. Raises RouterError."""
        if request.complete and request.known is not None:
            self._forward(exchange, request)
            return
        expect = request.fields.raw_value(b"expect")
        if expect is not None and expect.strip().lower() != b"100-continue":
            raise RouterError("expectation_failed", "the only expectation that can be met is 100-continue")
        if request.complete or request.failure is not None:
            self._forward(exchange, request)
            return
        connection = exchange.connection
        if expect is not None and not request.body_begun:
            connection.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        exchange.deadline = self._loop.call_later(self._options.body_s, self._body_is_late, exchange)
        connection.awaits_body = True

    def _body_is_late(self, exchange: ClientExchange[P]) -> None:
        exchange.close_after()
        text = f"the body did not arrive within {self._options.body_s:g} s"
        self.refused(exchange, RouterError("request_timeout", text))

    def body_came(self, exchange: ClientExchange[P]) -> None:
        """The request is complete, or has its failure."""
        if exchange.deadline is not None:
            exchange.deadline.cancel()
        try:
            self._forward(exchange, exchange.request)
        except Exception as error:
            self.refused(exchange, error)

    def _forward(self, exchange: ClientExchange[P], request: Request) -> None:
        """The whole body is there, as sent (compressed stays compressed), or why it is not. Raises RouterError."""
        if request.failure is not None:
            exchange.close_after()
            raise request.failure
        fields = request.fields
        screened = exchange.screened or self._screened(exchange, request)
        priority = self._priority(fields) if self._options.priority_header is not None else 0
        incoming = Incoming(
            exchange.route,
            screened.target,
            fields,
            screened.kept,
            request.body(),
            exchange.request_id,
            priority,
            screened.lines,
        )
        if self._forwarder is not None:
            exchange.started = self._forwarder.start(incoming, exchange, exchange, exchange)
        else:
            self._later(exchange, self._carrier.forward(incoming, exchange, exchange))

    def _screened(self, exchange: ClientExchange[P], request: Request) -> Screened:
        """The head of an admitted request, as far as it goes on to a worker."""
        keys = exchange.keys  # that admitted it; those of the listener may be others by now
        assert keys is not None
        kept = forwardable(request.fields.raw, keys, forward_authorization=self._options.forward_authorization)
        target = routes.origin_form(request.target).encode("ascii")
        screened = Screened(keys, exchange.route, target, kept)
        if request.known is not None:
            request.known.screened = screened
        return screened

    def go_on(self, exchange: ClientExchange[P]) -> None:
        """What `Forwarder.start` has begun has to wait for something."""
        self._later(exchange, self._rest(exchange))

    async def _rest(self, exchange: ClientExchange[P]) -> None:
        assert self._forwarder is not None
        assert exchange.started is not None
        await self._forwarder.go_on(exchange.started)

    def _later(self, exchange: ClientExchange[P], work: Coroutine[Any, Any, None]) -> None:
        exchange.work = work
        exchange.task = self._loop.create_task(self._await(exchange))

    async def _await(self, exchange: ClientExchange[P]) -> None:
        work, exchange.work = exchange.work, None
        assert work is not None
        try:
            await work
        except asyncio.CancelledError:
            self._cut(exchange)
            raise
        except Exception as error:
            self.refused(exchange, error)
        else:
            self.over(exchange)

    def left(self, exchange: ClientExchange[P]) -> None:
        """The client has gone."""
        if exchange.task is not None:
            exchange.task.cancel()
            if exchange.work is None:
                return  # it ends in its own turn
            exchange.work.close()  # a task that is cancelled before its first turn never has one
        try:
            if exchange.started is not None:
                exchange.started.cancel()
        except Exception as error:
            self.refused(exchange, error)
        else:
            self._cut(exchange)

    def _cut(self, exchange: ClientExchange[P]) -> None:
        if self._cutting:
            exchange.outcome = Outcome.STREAM_ERROR if exchange.answered else Outcome.UPSTREAM_ERROR
        self.over(exchange)

    def refused(self, exchange: ClientExchange[P], error: Exception) -> None:
        """Ends the exchange with an error of ours, or by cutting what has begun."""
        request = exchange.request
        if not isinstance(error, RouterError):
            log.error("request %s on %s failed", exchange.request_id, exchange.route, exc_info=error)
            error = RouterError("internal", "the router failed; its log says more")
        elif error.code == "bad_request" and exchange.route == UNMATCHED:
            exchange.close_after()  # an odd target (CONNECT's too): what follows may not be a request
        if not request.complete and request.fields.raw_value(b"expect") is not None:
            exchange.close_after()  # the body may come or not
        exchange.refuse(error)
        self.over(exchange)

    def over(self, exchange: ClientExchange[P]) -> None:
        """The one end of every request."""
        if exchange.deadline is not None:
            exchange.deadline.cancel()
        exchange.started = None  # it knows the exchange: a body must not be kept until a garbage collection
        self._in_flight -= 1
        if self._quiet is not None and not self._in_flight and not self._quiet.done():
            self._quiet.set_result(None)
        try:
            self._core.request_done(exchange.record(self._loop.time()))
        except Exception:  # the client has its answer already
            log.exception("request %s could not be recorded", exchange.request_id)
        exchange.connection.answered(exchange.keep and not self._leaving)

    def _priority(self, fields: RequestFields) -> int:
        """What the trusted field says; 0 for no integer."""
        try:
            return int(fields.get(self._options.priority_header or "", "0")[:10])
        except ValueError:
            return 0

    def _answer_own(self, exchange: ClientExchange[P], route: str) -> None:
        if route == routes.METRICS:
            self._later(exchange, self._answer_metrics(exchange))
            return
        if route == routes.HEALTH:
            body = b'{"status":"alive"}'
        elif route == routes.MODELS:
            body = self._core.models()
        elif self._leaving:
            raise RouterError("no_worker", "no worker can take a request now", retry_after_s=1)
        elif self._core.ready():
            body = b'{"status":"ready"}'
        else:
            raise self._core.not_ready()
        exchange.own(b"application/json", body)
        self.over(exchange)

    async def _answer_metrics(self, exchange: ClientExchange[P]) -> None:
        exchange.own(b"text/plain; version=0.0.4; charset=utf-8", await self._core.metrics())


class ClientExchange(Answer, Generic[P]):
    """One request of a client and its answer: what the listener, the forwarder and the connection know of it."""

    deadline: asyncio.TimerHandle | None = None
    """Of the body."""
    keys: ClientKeys | None = None
    """Those that admitted the request."""
    screened: Screened | None = None
    started: Started[P] | None = None
    task: asyncio.Task[None] | None = None
    work: Coroutine[Any, Any, None] | None = None
    """What `task` is to do, until its first turn."""

    def __init__(
        self,
        listener: PublicListener[P],
        connection: ClientConnection,
        request: Request,
        request_id_text: str,
        started_s: float,
    ) -> None:
        super().__init__(connection, request, request_id_text)
        self._listener = listener
        self._started_s = started_s
        self.request = request
        self.route = UNMATCHED

    # --- of its connection (downstream.Exchange), and of the forwarder (attempt.Waiter)

    def body_came(self) -> None:
        self._listener.body_came(self)

    def left(self) -> None:
        self._listener.left(self)

    def over(self) -> None:
        self._listener.over(self)

    def refused(self, error: Exception) -> None:
        self._listener.refused(self, error)

    def go_on(self) -> None:
        self._listener.go_on(self)

    # --- its ends

    def own(self, content_type: bytes, body: bytes) -> None:
        """An answer of the router itself."""
        self.whole(200, content_type, body)
        self.status, self.outcome = 200, Outcome.OK

    def refuse(self, error: RouterError) -> None:
        """Answer with our own error, or cut the connection when a worker's answer has begun already."""
        internal = error.status in (500, 502, 504)
        if self.begun:
            self.abort()
            self.outcome = Outcome.STREAM_ERROR
            return
        fields = [(b"Allow", error.allow.value.encode())] if isinstance(error, routes.MethodNotAllowed) else None
        if error.code == "unauthorized":
            fields = [(b"WWW-Authenticate", b"Bearer")]
        self.error_answer(error, fields)
        self.status, self.error = error.status, error.code
        self.outcome = Outcome.UPSTREAM_ERROR if internal else Outcome.REJECTED

    def record(self, now_s: float) -> RequestRecord:
        return RequestRecord(
            self.request_id,
            self.request.method,
            self.route,
            self.outcome,
            self.status,
            self.error,
            self.worker,
            self.attempts,
            now_s - self._started_s,
            None if self.first_byte_at is None else self.first_byte_at - self._started_s,
            self.usage,
            self.queued_s,
        )

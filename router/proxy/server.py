"""The public listener: admits a request, reads its body within limits, then forwards it or answers it itself."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from router.errors import RouterError
from router.proxy import routes
from router.proxy.downstream import Answer, ClientConnection
from router.proxy.forward import Forwarder, Incoming, Story
from router.proxy.headers import ClientKeys, forwardable, request_id
from router.proxy.plan import UNMATCHED, Core, Outcome, RequestRecord
from router.proxy.queue import NOBODY_WAITS, QueueOptions
from router.proxy.upstream import UpstreamClient

log = logging.getLogger("router.proxy")

parser_log = logging.getLogger("router.http")
"""aiohttp's own complaints about requests, with traces and the client's bytes: nobody's fault here, so off by default.
Faults of our handlers are logged by the handlers."""
parser_log.setLevel(logging.CRITICAL)

P = TypeVar("P")

_KEEP_ALIVE_S = 120.0
"""Longer than clients' and balancers' pools (openai 5 s, nginx 60 s), so that they, not we, end an idle connection."""
_SWEEP_S = 1.0
_FIELD_LIMIT_BYTES = 16 << 10


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
    priority_header: str | None = None
    """Name of a trusted field with an integer; requests with a larger one wait less."""


class _Protocols(web.Server):
    """aiohttp's low-level server, making our connections."""

    def __init__(
        self, handler: Any, max_connections: int, on_refused: Callable[[RouterError], None], **settings: Any
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self._max_connections = max_connections
        self._on_refused = on_refused
        self._settings = settings

    def __call__(self) -> RequestHandler:
        return ClientConnection(
            self, loop=self._loop, has_room=self._has_room, on_refused=self._on_refused, **self._settings
        )

    def _has_room(self) -> bool:
        return len(self._connections) <= self._max_connections


class PublicListener(Generic[P]):
    """`start`, then `leave` (say so, still serve) and `close` (finish, then cut) when the router ends."""

    def __init__(self, core: Core[P], upstream: UpstreamClient, options: ListenerOptions) -> None:
        self._core = core
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._forwarder = Forwarder(core, upstream, options.queue, clock=self._loop.time)
        self._keys = ClientKeys(options.api_keys)
        self._bodies = _Budget(options.max_buffered_bytes)
        self._protocols = _Protocols(
            self._handle,
            options.max_connections,
            self._refused_by_parser,
            keepalive_timeout=_KEEP_ALIVE_S,
            access_log=None,
            logger=parser_log,
            auto_decompress=False,
            max_line_size=_FIELD_LIMIT_BYTES,
            max_field_size=_FIELD_LIMIT_BYTES,
        )
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
    def waiting(self) -> int:
        """Requests that wait for room on a worker."""
        return self._forwarder.waiting

    @property
    def buffered_bytes(self) -> int:
        """Request bodies held now."""
        return self._bodies.held

    @property
    def port(self) -> int:
        """The port in use, also when 0 was asked for."""
        assert self._listening is not None
        return int(self._listening.sockets[0].getsockname()[1])

    async def start(self) -> None:
        """Bind and listen. Raises OSError when the address cannot be had."""
        options = self._options
        self._listening = await self._loop.create_server(
            self._protocols,
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
        """Take no connection and no request any more, wait up to `drain_s` for those in flight, then cut them."""
        self._leaving = self._draining = True
        if self._listening is not None:
            self._listening.close()
        for connection in self._connections():
            if not connection.busy:
                connection.force_close()
        if self._in_flight:
            self._quiet = self._loop.create_future()
            await asyncio.wait((self._quiet,), timeout=drain_s)
        self._cutting = True
        for connection in self._connections():
            if connection.transport is not None:
                connection.transport.abort()
        await self._protocols.shutdown(timeout=1.0)
        if self._sweeper is not None:
            self._sweeper.cancel()

    def _connections(self) -> list[ClientConnection]:
        return [each for each in self._protocols.connections if isinstance(each, ClientConnection)]

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in self._connections():
            connection.sweep(now, self._options.head_s, self._options.stall_s)
        self._sweeper = self._loop.call_later(_SWEEP_S, self._sweep)

    # --- one request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, ClientConnection)
        connection.head_arrived()
        self._in_flight += 1
        started = self._loop.time()
        story = Story()
        answer = Answer.to(request, connection, request_id(request.headers.getall("X-Request-Id", ())))
        if self._leaving:
            answer.close_after()
        route = UNMATCHED
        try:
            target = routes.origin_form(request.raw_path)
            route = routes.route_of(target)
            await self._serve(request, route, target, answer, story)
        except RouterError as error:
            if error.code == "bad_request" and route == UNMATCHED:
                answer.close_after()  # an odd target (CONNECT's too): what follows may not be a request
            _refuse(answer, story, error)
        except ConnectionError:
            answer.close_after()  # the client left while sending its body
        except asyncio.CancelledError:
            if self._cutting:
                story.outcome = Outcome.STREAM_ERROR if story.answered else Outcome.UPSTREAM_ERROR
            raise
        except Exception:
            log.exception("request %s on %s failed", answer.request_id, route)
            _refuse(answer, story, RouterError("internal", "the router failed; its log says more"))
        finally:
            connection.answered()
            self._in_flight -= 1
            if self._quiet is not None and not self._in_flight and not self._quiet.done():
                self._quiet.set_result(None)
            self._report(self._record(request, route, answer, story, started))
        if self._leaving:
            answer.close_after()
        return answer.sent()

    async def _serve(self, request: web.BaseRequest, route: str, target: str, answer: Answer, story: Story) -> None:
        if request.headers.get("Upgrade", "").lower() == "websocket":
            answer.close_after()
            raise RouterError("not_implemented", "WebSocket is not proxied")
        if route == routes.METRICS and not self._options.metrics:
            raise RouterError("not_found", "no such route on this listener")
        routes.check(request.method, route)
        keys = self._keys
        if route not in routes.KEYLESS and not keys.admit(request.headers):
            raise RouterError("unauthorized", "a client key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
        if route in routes.OWN:
            await self._answer_own(route, answer, story)
            return
        if self._draining:
            answer.close_after()
            raise RouterError("draining", "this router is shutting down", retry_after_s=1)
        body = await self._read_body(request, answer)
        try:
            kept = forwardable(request.raw_headers, keys, forward_authorization=self._options.forward_authorization)
            raw_target = target.encode("utf-8", "surrogateescape")
            priority = self._priority(request) if self._options.priority_header is not None else 0
            incoming = Incoming(route, raw_target, request.headers, kept, body, answer.request_id, priority)
            await self._forwarder.forward(incoming, answer, story)
        finally:
            self._bodies.give(len(body))

    def _priority(self, request: web.BaseRequest) -> int:
        """What the trusted field says; 0 for no integer."""
        try:
            return int(request.headers.get(self._options.priority_header or "", "0")[:10])
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
        elif self._core.ready() and not self._leaving:
            body = b'{"status":"ready"}'
        else:
            raise RouterError("no_worker", "no worker can take a request now", retry_after_s=1)
        answer.whole(status, content_type, body)
        story.status, story.outcome = status, Outcome.OK

    async def _read_body(self, request: web.BaseRequest, answer: Answer) -> bytes:
        """The whole body, as sent (compressed stays compressed), taken from `_bodies`: the caller gives it back.

        Raises RouterError, ConnectionError.
        """
        expect = request.headers.get("Expect")
        if expect is not None and expect.strip().lower() != "100-continue":
            raise RouterError("expectation_failed", "the only expectation that can be met is 100-continue")
        limit = self._options.max_body_bytes
        stated = request.headers.get("Content-Length")
        if stated is None:
            self._check_coding(request, answer)
        elif int(stated) > limit:
            answer.close_after()
            raise _too_large(limit)
        content = request.content
        try:
            if content.is_eof():
                body = content.read_nowait()
                self._bodies.take(len(body))
            else:
                if expect is not None and request.transport is not None:
                    request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                async with asyncio.timeout(self._options.body_s):
                    body = await _collect(content, limit, self._bodies)
        except TimeoutError:
            answer.close_after()
            text = f"the body did not arrive within {self._options.body_s:g} s"
            raise RouterError("request_timeout", text) from None
        except web.RequestPayloadError:
            answer.close_after()
            raise RouterError("bad_request", "the body is not framed as its fields say") from None
        except RouterError:
            answer.close_after()
            raise
        if len(body) > limit:
            self._bodies.give(len(body))
            raise _too_large(limit)
        return body

    def _check_coding(self, request: web.BaseRequest, answer: Answer) -> None:
        """Only `chunked` is undone here: a body gzipped for its transfer would reach the worker as if it were plain."""
        coding = request.headers.get("Transfer-Encoding")
        if coding is not None and coding.strip().lower() != "chunked":
            answer.close_after()
            raise RouterError("bad_request", "the only transfer coding that is taken is chunked")

    def _refused_by_parser(self, error: RouterError) -> None:
        outcome = Outcome.REJECTED if error.status < 500 else Outcome.UPSTREAM_ERROR
        self._report(RequestRecord("", "-", UNMATCHED, outcome, error.status, error.code, None, 0, 0.0, None, None))

    def _report(self, record: RequestRecord) -> None:
        try:
            self._core.request_done(record)
        except Exception:  # the client has its answer already
            log.exception("request %s could not be recorded", record.request_id)

    def _record(
        self, request: web.BaseRequest, route: str, answer: Answer, story: Story, started: float
    ) -> RequestRecord:
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


class _Budget:
    """Bytes of request bodies held at a time. A body counts as it arrives: one merely announced costs nothing."""

    __slots__ = ("_limit", "held")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.held = 0

    def take(self, count: int) -> None:
        """Raises RouterError("overloaded"), taking nothing."""
        if self.held + count > self._limit:
            raise RouterError("overloaded", "too many large requests at a time; try again soon", retry_after_s=1)
        self.held += count

    def give(self, count: int) -> None:
        self.held -= count


async def _collect(content: Any, limit: int, budget: _Budget) -> bytes:
    """What was taken from `budget` is given back when this raises."""
    pieces: list[bytes] = []
    held = 0
    try:
        while piece := await content.readany():
            budget.take(len(piece))
            held += len(piece)
            if held > limit:
                raise _too_large(limit)
            pieces.append(piece)
    except BaseException:
        budget.give(held)
        raise
    return b"".join(pieces)


def _too_large(limit: int) -> RouterError:
    return RouterError("body_too_large", f"the body is over {limit} bytes (listen.max_body_mb)")


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

"""The client's connection: requests in order, deadlines, and answers written straight to the socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Final, Protocol, cast

import msgspec

from router.errors import RouterError
from router.proxy.attempt import Story, Throttled
from router.proxy.headers import lines_of
from router.proxy.outbox import Outbox, Turn
from router.proxy.plan import RawHeaders
from router.proxy.request import Request, RequestParser

_MAX_WAITING_REQUESTS: Final = 32
"""Pipelined behind the one being answered; more are left in the socket."""
_LINGER_S: Final = 2.0
"""A client that still sends when we end the connection would lose our answer to a reset, so we listen for a while."""


class Exchange(Protocol):
    """What answers one request; it ends with `ClientConnection.answered`."""

    @property
    def task(self) -> asyncio.Task[None] | None:
        """Waits for something, if anything is waited for."""

    def body_came(self) -> None:
        """The request is complete, or has its failure."""

    def left(self) -> None:
        """The client has gone."""


class ClientConnection(asyncio.Protocol):
    """One accepted socket. `sweep` is to be called about once a second: it enforces the deadlines."""

    def __init__(
        self,
        turn: Turn,
        parser: RequestParser,
        serve: Callable[[ClientConnection, Request], None],
        on_made: Callable[[ClientConnection], bool],
        on_lost: Callable[[ClientConnection], None],
    ) -> None:
        """`serve` begins to answer one request: it sets `exchange`, and `answered` is called, perhaps before it
        returns. `on_made` is asked when the socket is accepted; False closes it at once."""
        self._turn = turn
        self._loop = turn.loop
        self._parser = parser
        self._serve = serve
        self._on_made = on_made
        self._on_lost = on_lost
        self.transport: asyncio.Transport | None = None
        self._outbox: Outbox | None = None
        self._tls = False
        self.exchange: Exchange | None = None
        self._request: Request | None = None
        """The one that is being answered."""
        self.awaits_body = False
        """Its exchange wants to know when all of its body has come."""
        self.busy = False
        """A request's head is complete and its answer is not."""
        self.throttled: Throttled | None = None
        self._waiting_since: float | None = None
        self._idle_since = 0.0
        self._ending_since: float | None = None
        self._full_since: float | None = None
        self._full_bytes = 0
        self._untaken: Request | None = None
        """Answered; what is pipelined behind waits for the client to take what it was sent."""
        self._held_back = False

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._outbox = Outbox(self._turn, self.transport)
        self._tls = transport.get_extra_info("sslcontext") is not None
        self._waiting_since = self._loop.time()
        if not self._on_made(self):
            self.transport.abort()
            return
        accepted = transport.get_extra_info("socket")
        if accepted is not None:  # a client whose machine is gone is noticed, also in a stream that pauses
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if self._ending_since is not None:
            return
        parser = self._parser
        parser.feed(data)
        if not self.busy:
            if parser.arrived:
                self._next()
            elif self._waiting_since is None and parser.in_head:
                self._waiting_since = self._loop.time()
            return
        if self.awaits_body:
            self._look_for_body()
        if len(parser.arrived) > _MAX_WAITING_REQUESTS and not self._held_back and self.transport is not None:
            self._held_back = True
            self.transport.pause_reading()

    def _look_for_body(self) -> None:
        request, exchange = self._request, self.exchange
        assert request is not None
        assert exchange is not None
        if request.complete or request.failure is not None:
            self.awaits_body = False
            exchange.body_came()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = self._outbox = None
        if self.exchange is not None:
            self.exchange.left()
        while self._parser.arrived:
            self._parser.arrived.popleft().release()
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._full_since = self._loop.time()
        self._full_bytes = self.unsent_bytes
        if self.throttled is not None:
            self.throttled.pause()

    def resume_writing(self) -> None:
        self._full_since = None
        request, self._untaken = self._untaken, None
        if request is not None:
            self._loop.call_soon(self._go_on, request)
        if self.throttled is not None:
            self.throttled.resume()

    # --- one request after the other

    def _next(self) -> None:
        """Begin to answer the request that came first."""
        arrived = self._parser.arrived
        if not arrived:
            return  # the client has gone meanwhile
        request = arrived.popleft()
        self._waiting_since = None
        self.busy = True
        self._request = request
        if self._held_back and not arrived:
            self._read_on()  # the rest of its body may still be in the socket
        self._serve(self, request)

    def answered(self, keep: bool) -> None:
        """The answer was written, or the client has gone. `keep`: the connection may live on."""
        request, self._request = self._request, None
        self.exchange = None
        self.awaits_body = False
        assert request is not None
        request.release()
        if self._tls:  # sends nothing more once the client has half-closed its socket, perhaps in this very turn
            self.flush()
        if not (keep and self._may_go_on(request)):
            self.end()
        elif self._full_since is not None:  # or a client that reads nothing has us keep an answer for each (case 77)
            self._untaken = request
        elif request.complete and not self._parser.arrived and not self._parser.in_head:
            self.busy = False
            self._idle_since = self._loop.time()
        else:
            self._go_on(request)

    def _go_on(self, request: Request) -> None:
        """With what comes behind `request`."""
        if request.complete and self._parser.arrived:
            self._loop.call_soon(self._next)  # behind each other in one read: others get their turn
        else:
            self._pause(request)

    def _pause(self, request: Request) -> None:
        """Nothing is to be answered, and all of `request` may not have come."""
        self.busy = False
        self._idle_since = now = self._loop.time()
        if self._parser.in_head or not request.complete:
            self._waiting_since = now
        if not request.complete:
            request.changed = lambda: self._rest_came(request)

    def _read_on(self) -> None:
        if self.transport is not None:
            self._held_back = False
            self.transport.resume_reading()

    def _may_go_on(self, request: Request) -> bool:
        """False when the client may or may not send the body it announced, or nothing behind it can be read."""
        if not request.keep_alive or request.failure is not None:
            return False
        return request.complete or request.fields.raw_value(b"expect") is None

    def _rest_came(self, request: Request) -> None:
        """A body that nobody wanted has come to its end: `data_received` begins the next request, if it is there."""
        self._waiting_since = None
        if request.failure is not None:
            self.end()

    def send(self, data: bytes) -> None:
        """Some of an answer; nothing when the client has gone."""
        if self._outbox is not None:
            self._outbox.write(data)

    def flush(self) -> None:
        """What was written is to go out before anything else happens to the connection."""
        if self._outbox is not None:
            self._outbox.flush()

    def end(self) -> None:
        """No further request: what was written still goes out, and the client has time to read it."""
        self.flush()
        transport = self.transport
        if transport is None or self._ending_since is not None or transport.is_closing():
            return
        self._ending_since = self._loop.time()
        if self._parser.quiet or not transport.can_write_eof():
            transport.close()
        else:
            transport.write_eof()

    def close(self) -> None:
        """Between two requests: the connection is not needed any more."""
        self.flush()
        if self.transport is not None:
            self.transport.close()

    @property
    def full(self) -> bool:
        """The client reads more slowly than we write."""
        return self._full_since is not None

    def sweep(self, now: float, head_s: float, stall_s: float, idle_s: float) -> None:
        """Cut a client that does not finish its request's head, or takes none of its answer (cases 77, 85)."""
        transport = self.transport
        if transport is None:
            return
        if self._ending_since is not None:
            limit_s = stall_s if self.unsent_bytes else _LINGER_S  # what is left may be too little to be full
            if now - self._ending_since > limit_s and not self.full:
                transport.abort()
        elif not self.busy:
            if self._waiting_since is not None:
                if now - self._waiting_since > head_s:
                    transport.abort()
            elif now - self._idle_since > idle_s:
                transport.close()
        if self._full_since is not None and now - self._full_since > stall_s:
            unsent = self.unsent_bytes
            if unsent >= self._full_bytes:
                transport.abort()
            self._full_since, self._full_bytes = now, unsent

    @property
    def unsent_bytes(self) -> int:
        """Of answers, that the client has not taken; what the kernel holds does not count."""
        return self._outbox.unsent_bytes if self._outbox is not None else 0


class Answer(Story):
    """`Client` of attempt.py on one request of a ClientConnection, and the story of it."""

    _chunked: bool = False
    _length_stated: bool = False
    _pending: bytes = b""
    begun: bool = False

    def __init__(self, connection: ClientConnection, request: Request, request_id: str) -> None:
        super().__init__()
        self.connection = connection
        self._http11 = request.http11
        self.keep = request.keep_alive
        """The connection lives on after this answer."""
        self._head_only = request.method == "HEAD"
        self.request_id = request_id

    def begin(self, status: int, reason: bytes, lines: bytes, length: int | None, has_body: bool) -> None:
        self.begun = True
        if has_body and self.keep and self._http11 and self.request_id:  # as nearly all are
            if length is not None:
                self._length_stated = True
                framing = b"Content-Length: %d" % length
            else:
                self._chunked = True
                framing = b"Transfer-Encoding: chunked"
            own = self.request_id.encode("ascii")
            self._pending = b"HTTP/1.1 %d %b\r\n%bX-Request-Id: %b\r\n%b\r\n\r\n" % (
                status,
                reason,
                lines,
                own,
                framing,
            )
            return
        parts = [b"HTTP/1.1 %d %b\r\n" % (status, reason), lines]
        if self.request_id:
            parts += (b"X-Request-Id: ", self.request_id.encode("ascii"), b"\r\n")
        if has_body:
            if length is not None:
                self._length_stated = True
                parts.append(b"Content-Length: %d\r\n" % length)
            elif self._http11:
                self._chunked = True
                parts.append(b"Transfer-Encoding: chunked\r\n")
            else:
                self.keep = False  # an HTTP/1.0 client takes the connection's end for the body's
        if not self.keep:
            parts.append(b"Connection: close\r\n")
        elif not self._http11:
            parts.append(b"Connection: keep-alive\r\n")
        parts.append(b"\r\n")
        self._pending = b"".join(parts)

    def flush(self) -> None:
        if self._pending:
            self._send(b"")

    def write(self, data: bytes) -> None:
        if data and self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        if self._pending or self._head_only:
            self._send(data)
        else:
            self.connection.send(data)

    def end(self, data: bytes) -> None:
        if self._chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        self._send(data)

    def _send(self, data: bytes) -> None:
        if self._pending:
            data, self._pending = (self._pending if self._head_only else self._pending + data), b""
        elif self._head_only:
            return
        self.connection.send(data)

    def abort(self) -> None:
        """The end without the body's end: what was sent is still delivered, so that the client gets all there was."""
        self.keep = False
        self.flush()
        self.connection.flush()
        transport = self.connection.transport
        if transport is None:
            return
        if self._chunked or self._length_stated:
            transport.close()
        else:
            transport.abort()  # only a reset differs from the proper end here

    def throttle(self, source: Throttled | None) -> None:
        self.connection.throttled = source
        if source is not None and self.connection.full:
            source.pause()

    def whole(self, status: int, content_type: bytes, body: bytes, fields: RawHeaders | None = None) -> None:
        """An answer of the router itself."""
        every = [(b"Content-Type", content_type), *(fields or [])]
        self.begin(status, HTTPStatus(status).phrase.encode(), lines_of(every), len(body), True)
        self.end(body)

    def error_answer(self, error: RouterError, fields: RawHeaders | None = None) -> None:
        """The one error shape of the public listener (interface.md)."""
        every = [(b"x-kv-router-error", error.code.encode()), *(fields or [])]
        if error.retry_after_s is not None:
            every.append((b"Retry-After", b"%d" % error.retry_after_s))
        body = {"error": {"message": error.message, "type": error.type, "code": error.code}}
        self.whole(error.status, b"application/json", msgspec.json.encode(body), every)

    def close_after(self) -> None:
        """No further request on this connection."""
        self.keep = False

"""The client's connection: requests in order, deadlines, and answers written straight to the socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, cast

import msgspec

from router.errors import RouterError
from router.proxy.forward import Throttled
from router.proxy.plan import RawHeaders
from router.proxy.request import Request, RequestParser

_MAX_WAITING_REQUESTS = 32
"""Pipelined behind the one being answered; more are left in the socket."""
_LINGER_S = 2.0
"""A client that still sends when we end the connection would lose our answer to a reset, so we listen for a while."""


class ClientConnection(asyncio.Protocol):
    """One accepted socket. `sweep` is to be called about once a second: it enforces the deadlines."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        parser: RequestParser,
        serve: Callable[[ClientConnection, Request], Coroutine[Any, Any, bool]],
        on_made: Callable[[ClientConnection], bool],
        on_lost: Callable[[ClientConnection], None],
    ) -> None:
        """`serve` answers one request and says whether the connection lives on; it is cancelled when the client leaves.
        `on_made` is asked when the socket is accepted; False closes it at once."""
        self._loop = loop
        self._parser = parser
        self._serve = serve
        self._on_made = on_made
        self._on_lost = on_lost
        self.transport: asyncio.Transport | None = None
        self.task: asyncio.Task[None] | None = None
        """Answers the requests, from the first one to the connection's end: a task for each would cost 2 µs more."""
        self.busy = False
        """A request's head is complete and its answer is not."""
        self._next: asyncio.Future[None] | None = None
        self.throttled: Throttled | None = None
        self._waiting_since: float | None = None
        self._idle_since = 0.0
        self._ending_since: float | None = None
        self._full_since: float | None = None
        self._full_bytes = 0
        self._taken: asyncio.Future[None] | None = None
        """Done when the client has taken what it was sent: what is pipelined behind waits for it."""
        self._held_back = False

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
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
                self._begin()
            elif self._waiting_since is None and parser.in_head:
                self._waiting_since = self._loop.time()
        elif len(parser.arrived) > _MAX_WAITING_REQUESTS and not self._held_back:
            self._held_back = True
            assert self.transport is not None
            self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.task is not None:
            self.task.cancel()
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
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(None)
        if self.throttled is not None:
            self.throttled.resume()

    # --- one request after the other

    def _begin(self) -> None:
        self._waiting_since = None
        self.busy = True
        if self._next is not None:
            self._next.set_result(None)
            self._next = None
        else:
            self.task = self._loop.create_task(self._answer_all())

    async def _answer_all(self) -> None:
        arrived = self._parser.arrived
        while True:
            request = arrived.popleft()
            if not arrived:
                self._read_on()  # the rest of its body may still be in the socket
            try:
                keep = await self._serve(self, request)
            finally:
                request.release()
            if not (keep and self._may_go_on(request)):
                self.end()
                return
            if self.full:  # or a client that reads nothing has us keep an answer for each request (case 77)
                self._taken = self._loop.create_future()
                await self._taken
            if request.complete and arrived:
                await asyncio.sleep(0)  # behind each other in one read: others get their turn
                continue
            self._pause(request)
            self._next = self._loop.create_future()
            await self._next

    def _pause(self, request: Request) -> None:
        """Nothing is to be answered, and all of `request` may not have come."""
        self.busy = False
        self._idle_since = now = self._loop.time()
        if self._parser.in_head or not request.complete:
            self._waiting_since = now
        if not request.complete:
            request.changed = lambda: self._rest_came(request)

    def _read_on(self) -> None:
        if self._held_back and self.transport is not None:
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

    def end(self) -> None:
        """No further request: what was written still goes out, and the client has time to read it."""
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
        return self.transport.get_write_buffer_size() if self.transport is not None else 0


class Answer:
    """`Client` of forward.py on one request of a ClientConnection."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_head_only",
        "_http11",
        "_length_stated",
        "_pending",
        "begun",
        "keep",
        "request_id",
    )

    def __init__(self, connection: ClientConnection, request: Request, request_id: str) -> None:
        self._connection = connection
        self._http11 = request.http11
        self.keep = request.keep_alive
        """The connection lives on after this answer."""
        self._head_only = request.method == "HEAD"
        self._chunked = False
        self._length_stated = False
        self._pending = b""
        self.begun = False
        self.request_id = request_id

    def begin(self, status: int, reason: bytes, fields: RawHeaders, length: int | None, *, has_body: bool) -> None:
        self.begun = True
        lines = [b"HTTP/1.1 %d %b" % (status, reason)]
        lines += [b"%b: %b" % field for field in fields]
        if self.request_id:
            lines.append(b"X-Request-Id: %b" % self.request_id.encode("ascii"))
        if has_body:
            if length is not None:
                self._length_stated = True
                lines.append(b"Content-Length: %d" % length)
            elif self._http11:
                self._chunked = True
                lines.append(b"Transfer-Encoding: chunked")
            else:
                self.keep = False  # an HTTP/1.0 client takes the connection's end for the body's
        if not self.keep:
            lines.append(b"Connection: close")
        elif not self._http11:
            lines.append(b"Connection: keep-alive")
        lines.append(b"\r\n")
        self._pending = b"\r\n".join(lines)

    def flush(self) -> None:
        if self._pending:
            self._send(b"")

    def write(self, data: bytes) -> None:
        if data and self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._send(data)

    def end(self, data: bytes) -> None:
        if self._chunked:
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
        self._send(data)

    def _send(self, data: bytes) -> None:
        if self._pending:
            data, self._pending = (self._pending if self._head_only else self._pending + data), b""
        elif self._head_only:
            return
        transport = self._connection.transport
        if data and transport is not None and not transport.is_closing():
            transport.write(data)

    def abort(self) -> None:
        """The end without the body's end: what was sent is still delivered, so that the client gets all there was."""
        self.keep = False
        self.flush()
        transport = self._connection.transport
        if transport is None:
            return
        if self._chunked or self._length_stated:
            transport.close()
        else:
            transport.abort()  # only a reset differs from the proper end here

    def throttle(self, source: Throttled | None) -> None:
        self._connection.throttled = source
        if source is not None and self._connection.full:
            source.pause()

    def whole(self, status: int, content_type: bytes, body: bytes, fields: RawHeaders | None = None) -> None:
        """An answer of the router itself."""
        every = [(b"Content-Type", content_type), *(fields or [])]
        self.begin(status, HTTPStatus(status).phrase.encode(), every, len(body), has_body=True)
        self.end(body)

    def error(self, error: RouterError, fields: RawHeaders | None = None) -> None:
        """The one error shape of the public listener (interface.md)."""
        every = [(b"x-kv-router-error", error.code.encode()), *(fields or [])]
        if error.retry_after_s is not None:
            every.append((b"Retry-After", b"%d" % error.retry_after_s))
        body = {"error": {"message": error.message, "type": error.type, "code": error.code}}
        self.whole(error.status, b"application/json", msgspec.json.encode(body), every)

    def close_after(self) -> None:
        """No further request on this connection."""
        self.keep = False

"""The client's connection: aiohttp's HTTP/1.1 server protocol, with deadlines, and answers written straight to it.

aiohttp parses requests, keeps them in order and notices when the client leaves. Answers do not pass through its
response classes: a relayed head and its pieces are bytes already.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web
from aiohttp.http import HttpVersion11
from aiohttp.web_protocol import RequestHandler

from router.errors import RouterError
from router.proxy.forward import Throttled
from router.proxy.plan import RawHeaders

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp.abc import AbstractStreamWriter


class Sent(web.StreamResponse):
    """Tells aiohttp that the answer is written already, and whether the connection lives on."""

    def __init__(self, *, keep: bool) -> None:
        super().__init__()
        self._keep = keep

    @property
    def keep_alive(self) -> bool | None:
        return self._keep

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class ClientConnection(RequestHandler):
    """One accepted socket. `sweep` is to be called about once a second: it enforces the deadlines."""

    def __init__(
        self,
        *args: Any,
        has_room: Callable[[], bool],
        on_refused: Callable[[RouterError], None],
        **settings: Any,
    ) -> None:
        """`has_room` is asked when the socket is accepted; False closes it at once. `on_refused` is told of every
        request that never reached the handler because it is not well-formed HTTP."""
        super().__init__(*args, **settings)
        self._has_room = has_room
        self._on_refused = on_refused
        self.busy = False
        """A request's head is complete and its answer is not."""
        self.throttled: Throttled | None = None
        self._waiting_since: float | None = None
        self._full_since: float | None = None
        self._full_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._waiting_since = self._loop.time()
        if not self._has_room():
            self.force_close()

    def data_received(self, data: bytes) -> None:
        if not self.busy and self._waiting_since is None:
            self._waiting_since = self._loop.time()
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._full_since = self._loop.time()
        self._full_bytes = self._unsent_bytes()
        if self.throttled is not None:
            self.throttled.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._full_since = None
        if self.throttled is not None:
            self.throttled.resume()

    @property
    def full(self) -> bool:
        """The client reads more slowly than we write."""
        return self._full_since is not None

    def head_arrived(self) -> None:
        self.busy = True
        self._waiting_since = None

    def answered(self) -> None:
        self.busy = False

    def sweep(self, now: float, head_s: float, stall_s: float) -> None:
        """Cut a client that does not finish its request's head, or takes none of its answer (cases 77, 85)."""
        if self.transport is None:
            return
        if not self.busy and self._waiting_since is not None and now - self._waiting_since > head_s:
            self.transport.abort()
        if self._full_since is not None and now - self._full_since > stall_s:
            unsent = self._unsent_bytes()
            if unsent >= self._full_bytes:
                self.transport.abort()
            self._full_since, self._full_bytes = now, unsent

    def _unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """What aiohttp's parser refused (smuggling, broken heads, case 106), in our error shape; nothing is logged."""
        code = "bad_request" if status < 500 else "internal"
        text = "the request is not well-formed HTTP" if status < 500 else "the router failed"
        answer = Answer(self, keep=False)
        error = RouterError(code, text)
        answer.error(error)
        self._on_refused(error)
        return answer.sent()


class Answer:
    """`Client` of forward.py on one request of a ClientConnection."""

    __slots__ = (
        "_chunked",
        "_connection",
        "_head_only",
        "_http11",
        "_keep",
        "_length_stated",
        "_pending",
        "begun",
        "request_id",
    )

    def __init__(
        self,
        connection: ClientConnection,
        *,
        keep: bool,
        http11: bool = True,
        head_only: bool = False,
        request_id: str = "",
    ) -> None:
        self._connection = connection
        self._http11 = http11
        self._keep = keep
        self._head_only = head_only
        self._chunked = False
        self._length_stated = False
        self._pending = b""
        self.begun = False
        self.request_id = request_id

    @classmethod
    def to(cls, request: web.BaseRequest, connection: ClientConnection, request_id: str) -> Answer:
        return cls(
            connection,
            keep=bool(request.keep_alive),
            http11=request.version >= HttpVersion11,
            head_only=request.method == "HEAD",
            request_id=request_id,
        )

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
                self._keep = False  # an HTTP/1.0 client takes the connection's end for the body's
        if not self._keep:
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
        self._keep = False
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
        self._keep = False

    def sent(self) -> Sent:
        return _KEPT if self._keep else _CLOSED


_KEPT, _CLOSED = Sent(keep=True), Sent(keep=False)

"""One connection to a worker: HTTP/1.1 framing by llhttp, one exchange at a time, back-pressure both ways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from router.errors import ERRORS, RouterError
from router.proxy.plan import Fault, RawHeaders

if TYPE_CHECKING:
    from collections.abc import Sequence

HEAD_LIMIT_BYTES = 64 << 10
FIELDS_LIMIT = 256
_UNREAD_LIMIT_BYTES = 256 << 10
_SLICE_BYTES = 256 << 10
_COPIED_BYTES = 8 << 10
"""A body up to this is put behind its head: copying it costs less than a second buffer."""
_BODYLESS = frozenset({204, 304})


class UpstreamError(Exception):
    """A worker could not be used for this exchange. `code` is what the client is told, `fault` what the breaker is."""

    code = "upstream_reset"
    fault: Fault = "reset"

    def to_client(self) -> RouterError:
        """Says nothing of the worker's address; the log does."""
        return RouterError(self.code, ERRORS[self.code].meaning)


class UpstreamConnectError(UpstreamError):
    """No connection: nothing of the request was sent, so another worker may be tried."""

    code, fault = "upstream_connect", "connect"


class UpstreamReset(UpstreamError):
    """The connection ended before the answer did. The worker may have accepted the work."""


class UpstreamTimeout(UpstreamError):
    """The worker was silent longer than the idle limit."""

    code, fault = "upstream_timeout", "timeout"


class UpstreamProtocolError(UpstreamError):
    """What the worker sent is not an HTTP answer within the limits."""

    code, fault = "upstream_protocol", "protocol"


class Sink(Protocol):
    """Takes a body as it arrives. Called from the event loop's read callback: must not block and must not raise."""

    def write(self, data: bytes) -> None: ...
    def end(self, data: bytes) -> None:
        """The last piece (maybe empty): the body is complete."""


class Connection(asyncio.Protocol):
    """Parses answers and pushes body pieces into a sink in the same loop turn in which they arrived.

    `on_idle` is called when an exchange ended and the connection can carry another; `on_lost` once, at the very end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_idle: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self._loop = loop
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._drained: asyncio.Future[None] | None = None
        self._write_paused = False
        self._read_paused = False
        self.busy = False
        self.last_activity = 0.0
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.reason = b""
        self.headers: RawHeaders = []
        self.content_length: int | None = None
        self.got_bytes = False
        self._head: asyncio.Future[None] | None = None
        self._done: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._pieces: list[bytes] = []
        self._head_bytes = 0
        self._head_complete = False
        self._complete = False
        self._until_close = False
        self._no_body = False
        self._keep_alive = False
        self._sent_all = False
        self._error: UpstreamError | None = None

    # --- the exchange, as the client drives it

    async def exchange(self, head: bytes, body: bytes, *, no_body: bool) -> None:
        """Send one request and return when the answer's head is there. Raises UpstreamError."""
        if self._transport is None:
            raise UpstreamReset("the worker closed the connection")
        self._begin()
        self.busy = True
        self._no_body = no_body
        self._head = self._loop.create_future()
        self.last_activity = self._loop.time()
        if len(body) <= _SLICE_BYTES:
            if len(body) <= _COPIED_BYTES:
                self._transport.write(head + body)
            else:
                self._transport.writelines((head, body))
            self._sent_all = True
        else:
            self._transport.write(head)
            self._sent_all = await self._send_large(memoryview(body))
        await self._head

    async def _send_large(self, body: memoryview) -> bool:
        """Slice by slice, so that a body waits in memory once. False: the answer (such as 413) came before its end."""
        assert self._head is not None
        for start in range(0, len(body), _SLICE_BYTES):
            if self._write_paused:
                self._drained = self._loop.create_future()
                await asyncio.wait((self._drained, self._head), return_when=asyncio.FIRST_COMPLETED)
            if self._head.done() or self._transport is None:
                return False
            self._transport.write(body[start : start + _SLICE_BYTES])
        return True

    async def pipe(self, sink: Sink) -> None:
        """Push the whole body into `sink`. Raises UpstreamError when it does not come to its proper end."""
        data = b"".join(self._pieces)
        self._pieces = []
        if self._complete:
            sink.end(data)
            return
        if data:
            sink.write(data)
        if self._error is not None:
            raise self._error
        self._sink = sink
        self._done = self._loop.create_future()
        self.resume_reading()
        await self._done

    @property
    def has_data(self) -> bool:
        return self._complete or bool(self._pieces)

    def pause_reading(self) -> None:
        if not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._read_paused and self._transport is not None:
            self._read_paused = False
            self.last_activity = self._loop.time()
            self._transport.resume_reading()

    def release(self) -> None:
        """The exchange is over for its owner. An unfinished one costs the connection (the worker sees it at once)."""
        self._sink = None
        if self.busy and not (self._complete and self._reusable()):
            self.abort()
        elif self.busy:
            self.busy = False
            self.resume_reading()
            self._on_idle(self)

    def _reusable(self) -> bool:
        return (
            self._sent_all
            and self._keep_alive
            and not self._no_body  # llhttp does not know that the request was a HEAD
            and self._error is None
            and self.open
        )

    @property
    def open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def peer(self) -> str:
        """The address at the other end; loopback's once the connection is gone."""
        peername = self._transport.get_extra_info("peername") if self._transport is not None else None
        return str(peername[0]) if peername else "127.0.0.1"

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def silent_since(self, deadline: float) -> bool:
        """The worker owes bytes and has sent none since `deadline`. A reader we hold back is not the worker's fault."""
        return self.busy and not self._complete and not self._read_paused and self.last_activity < deadline

    def fail(self, error: UpstreamError) -> None:
        """End the exchange with `error`, and the connection with it."""
        if self._error is None:
            self._error = error
        for waiter in (self._head, self._done):
            if waiter is not None and not waiter.done():
                waiter.set_exception(self._error)
                waiter.exception()  # retrieved: the owner may have been cancelled and never look
        self.abort()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self.busy or self._complete:
            self.fail(UpstreamProtocolError("the worker sent bytes that belong to no request"))
            return
        self.last_activity = self._loop.time()
        self.got_bytes = True
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self.fail(UpstreamProtocolError("the worker switched protocols unasked"))
        except HttpParserError as error:
            if not self._complete:
                cause = error.__context__ or error
                self.fail(UpstreamProtocolError(f"the worker's answer is not valid HTTP ({cause})"))
                return
            self._error = UpstreamProtocolError("the worker sent more than its answer")
        if not self._head_complete:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT_BYTES:
                self.fail(UpstreamProtocolError(f"the worker's answer head is over {HEAD_LIMIT_BYTES} bytes"))
            return
        self._deliver()

    def _deliver(self) -> None:
        sink = self._sink
        if sink is None:
            if not self._complete and sum(map(len, self._pieces)) > _UNREAD_LIMIT_BYTES:
                self.pause_reading()
            return
        pieces = self._pieces
        if pieces or self._complete:
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._pieces = []
            if self._complete:
                self._finish(sink, data)
            else:
                sink.write(data)

    def _finish(self, sink: Sink, data: bytes) -> None:
        self._sink = None
        sink.end(data)
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def eof_received(self) -> None:
        if self._head_complete and self._until_close and not self._complete:
            self._complete = True
            self._deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.busy and not self._complete:
            where = "in the middle of its answer" if self._head_complete else "before it answered"
            self.fail(UpstreamReset(f"the worker closed the connection {where}"))
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._on_lost(self)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self.last_activity = self._loop.time()
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # --- llhttp

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("a second answer")

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_complete:
            return  # trailers end here: they are hop-by-hop for a proxy that re-frames
        self._head_bytes += len(name) + len(value)
        if len(self.headers) >= FIELDS_LIMIT or self._head_bytes > HEAD_LIMIT_BYTES:
            raise ValueError("too many header fields")
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        if self.status < 200:
            return
        self._head_complete = True
        self._keep_alive = self._parser.should_keep_alive()
        self._until_close, self.content_length = _framing(self.headers)
        if self._no_body or self.status in _BODYLESS:
            self._until_close, self.content_length = False, None
            self._complete = True
        if self._head is not None and not self._head.done():
            self._head.set_result(None)

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100, 102, 103: the real answer follows
            self.headers = []
            self.reason = b""
        elif not self._until_close:
            self._complete = True


def _framing(headers: Sequence[tuple[bytes, bytes]]) -> tuple[bool, int | None]:
    """(the body ends with the connection, its length if stated). llhttp has refused contradictory fields."""
    chunked = False
    length: int | None = None
    coded = False
    for name, value in headers:
        lower = name.lower()
        if lower == b"transfer-encoding":
            coded = True
            chunked = value.lower().rstrip().endswith(b"chunked")
        elif lower == b"content-length":
            length = int(value)
    if coded:
        return not chunked, None
    return length is None, length

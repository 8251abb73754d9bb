"""One connection to a worker: HTTP/1.1 framing by llhttp, one exchange at a time, back-pressure both ways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar, Final, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from router.errors import ERRORS, RouterError
from router.proxy.headers import AnswerFields
from router.proxy.known_head import KnownHead
from router.proxy.outbox import Outbox, Turn
from router.proxy.plan import Fault, RawHeaders

HEAD_LIMIT_BYTES = 64 << 10
FIELDS_LIMIT = 256
_UNREAD_LIMIT_BYTES = 256 << 10
AT_ONCE_BYTES: Final = 256 << 10
"""A larger body is sent in slices of this size."""
_COPIED_BYTES = 8 << 10
"""A body up to this is put behind its head: copying it costs less than a second buffer."""
_KNOWN_ANSWERS: Final = 4
"""Heads that a connection gets to know in vain; where each one differs (in an id, say) it is not worth more."""
_LEN_CONTENT_LENGTH: Final = 14
_LEN_TRANSFER_ENCODING: Final = 17
_BODYLESS = frozenset({204, 304})


class UpstreamError(Exception):
    """A worker could not be used for this exchange. `code` is what the client is told, `fault` what the breaker is."""

    code: ClassVar[str] = "upstream_reset"
    fault: ClassVar[Fault] = "reset"

    def to_client(self) -> RouterError:
        """Says nothing of the worker's address; the log does."""
        return RouterError(self.code, ERRORS[self.code].meaning)


class UpstreamConnectError(UpstreamError):
    """No connection: nothing of the request was sent, so another worker may be tried."""

    code: ClassVar[str] = "upstream_connect"
    fault: ClassVar[Fault] = "connect"


class UpstreamReset(UpstreamError):
    """The connection ended before the answer did. The worker may have accepted the work."""


class UpstreamTimeout(UpstreamError):
    """The worker was silent longer than the idle limit."""

    code: ClassVar[str] = "upstream_timeout"
    fault: ClassVar[Fault] = "timeout"


class UpstreamProtocolError(UpstreamError):
    """What the worker sent is not an HTTP answer within the limits."""

    code: ClassVar[str] = "upstream_protocol"
    fault: ClassVar[Fault] = "protocol"


class Sink(Protocol):
    """Takes a body as it arrives. Called from the event loop's read callback: must not block and must not raise."""

    def write(self, data: bytes) -> None: ...
    def end(self, data: bytes) -> None:
        """The last piece (maybe empty): the body is complete."""


class Owner(Protocol):
    """Whose exchange it is. Called from the event loop's read callback: must not block and must not raise."""

    def head_came(self) -> None:
        """The answer's head is there; `Connection.attach` takes the body."""

    def ended(self) -> None:
        """The sink has had the end of the body."""

    def failed(self, error: UpstreamError) -> None:
        """Instead of the head, or of the body's end. Nothing more is told."""


class _Waiting:
    """The owner that a coroutine waits for: `done` comes with the head, or with the end of the body."""

    __slots__ = ("done",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.done: asyncio.Future[None] = loop.create_future()

    def head_came(self) -> None:
        self.ended()

    def ended(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def failed(self, error: UpstreamError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # retrieved: who waits may have been cancelled and never look


class KnownAnswer:
    """An answer whose head the connection may see again."""

    __slots__ = ("fields", "head", "reason", "status")

    def __init__(self, status: int, reason: bytes, headers: RawHeaders, fields: AnswerFields) -> None:
        self.status = status
        self.reason = reason
        self.fields = fields
        self.head = KnownHead(b"HTTP/1.1 %d %b" % (status, reason), headers)


class Connection(asyncio.Protocol):
    """Parses answers and pushes body pieces into a sink in the same loop turn in which they arrived.

    `on_idle` is called when an exchange ended and the connection can carry another; `on_lost` once, at the very end.
    """

    def __init__(
        self,
        turn: Turn,
        on_idle: Callable[[Connection], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self._turn = turn
        self._loop = turn.loop
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._pieces: list[bytes] = []
        self.on_body: Callable[[bytes], None] = self._pieces.append
        """llhttp puts the pieces there itself: a method of ours would cost more than all else for a small piece."""
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._outbox: Outbox | None = None
        self._drained: asyncio.Future[None] | None = None
        self._write_paused = False
        self._read_paused = False
        self._known: KnownAnswer | None = None
        self._to_know = _KNOWN_ANSWERS
        self.busy = False
        self.last_activity = 0.0
        self._begin()

    def _begin(self) -> None:
        self.status = 0
        self.reason = b""
        self.headers: RawHeaders = []
        self.fields: AnswerFields | None = None
        """Made of `headers`, when they were known."""
        self.content_length: int | None = None
        self.got_bytes = False
        self._owner: Owner | None = None
        self._sink: Sink | None = None
        self._pieces.clear()
        self._head_bytes = 0
        self._head_complete = False
        self._head_told = False
        self._complete = False
        self._until_close = False
        self._no_body = False
        self._keep_alive = False
        self._sent_all = False
        self._error: UpstreamError | None = None

    # --- the exchange, as the client drives it

    def ask(self, head: bytes, body: bytes, owner: Owner) -> None:
        """Send one request (no HEAD) of at most AT_ONCE_BYTES. Must be `open`; `owner` is told what comes of it."""
        outbox = self._outbox
        assert outbox is not None
        self._begin()
        self.busy = True
        self._owner = owner
        self.last_activity = self._loop.time()
        if len(body) <= _COPIED_BYTES:
            outbox.write(head + body)
        else:
            assert self._transport is not None
            outbox.flush()  # a worker that answered unasked may not have been sent the request before
            self._transport.writelines((head, body))
        self._sent_all = True

    def attach(self, sink: Sink) -> None:
        """Push what has come of the body into `sink`, and from now on what comes."""
        self._sink = sink
        if self._read_paused:
            self.resume()
        self._deliver()

    def disown(self) -> None:
        """The owner is not told any more. What arrives is kept."""
        self._owner = None

    async def exchange(self, head: bytes, body: bytes, *, no_body: bool) -> None:
        """Send one request and return when the answer's head is there. Raises UpstreamError."""
        if self._transport is None:
            raise UpstreamReset("the worker closed the connection")
        waiting = _Waiting(self._loop)
        if len(body) <= AT_ONCE_BYTES:
            self.ask(head, body, waiting)
            self._no_body = no_body
        else:
            self.ask(head, b"", waiting)
            self._sent_all = False
            if self._outbox is not None:
                self._outbox.flush()
            self._sent_all = await self._send_large(memoryview(body), waiting.done)
        await waiting.done

    async def _send_large(self, body: memoryview, head: asyncio.Future[None]) -> bool:
        """Slice by slice, so that a body waits in memory once. False: the answer (such as 413) came before its end."""
        for start in range(0, len(body), AT_ONCE_BYTES):
            if self._write_paused:
                self._drained = self._loop.create_future()
                await asyncio.wait((self._drained, head), return_when=asyncio.FIRST_COMPLETED)
            if head.done() or self._transport is None:
                return False
            self._transport.write(body[start : start + AT_ONCE_BYTES])
        return True

    async def pipe(self, sink: Sink) -> None:
        """Push the whole body into `sink`. Raises UpstreamError when it does not come to its proper end."""
        if self._error is not None and not self._complete:
            self._sink = sink
            self._deliver()
            self._sink = None
            raise self._error
        waiting = _Waiting(self._loop)
        self._owner = waiting
        self.attach(sink)
        await waiting.done

    @property
    def whole(self) -> bool:
        """Nothing more will come."""
        return self._complete

    @property
    def has_data(self) -> bool:
        """Body bytes, or the body's end, came together with the head."""
        return self._complete or bool(self._pieces)

    def pause(self) -> None:
        if not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._read_paused and self._transport is not None:
            self._read_paused = False
            self.last_activity = self._loop.time()
            self._transport.resume_reading()

    def release(self) -> None:
        """The exchange is over for its owner. An unfinished one costs the connection (the worker sees it at once)."""
        self._sink = None
        self._owner = None
        if not self.busy:
            return
        transport = self._transport
        if (
            self._complete
            and self._sent_all
            and self._keep_alive
            and not self._no_body  # llhttp does not know that the request was a HEAD
            and self._error is None
            and transport is not None
            and not transport.is_closing()
        ):
            self.busy = False
            if self._read_paused:
                self.resume()
            self._on_idle(self)
        else:
            self.abort()

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
        owner, self._owner = self._owner, None
        self.abort()
        if owner is not None:
            owner.failed(self._error)

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._outbox = Outbox(self._turn, self._transport)
        self.last_activity = self._loop.time()

    def data_received(self, data: bytes) -> None:
        if not self.busy or self._complete:
            self.fail(UpstreamProtocolError("the worker sent bytes that belong to no request"))
            return
        self.last_activity = self._loop.time()
        if not self.got_bytes:
            self.got_bytes = True
            known = self._known
            if known is not None and self._repeats(known, data):
                self._tell_head()
                return
        error: UpstreamError | None = None
        try:
            self._parser.feed_data(data)
        except (HttpParserUpgrade, HttpParserError) as raised:
            error = self._broken(raised)
        if not self._head_told:
            error = self._bound_head(len(data)) or error
            if self._head_complete:
                if self._complete and self._to_know:
                    self._get_to_know(data)
                self._tell_head()
        if error is not None:
            self.fail(error)
        elif self._pieces or self._sink is not None:
            self._deliver()

    def _tell_head(self) -> None:
        self._head_told = True
        if self._owner is not None:
            self._owner.head_came()

    def _repeats(self, known: KnownAnswer, data: bytes) -> bool:
        """`data` is one whole answer with that head, and is taken."""
        if self._no_body:
            return False
        digits, start = known.head.find(data)
        length = len(data) - start
        if not start or int(digits) != length:
            return False
        self.status, self.reason, self.headers = known.status, known.reason, known.head.fields(digits)
        self.content_length = length
        self._head_complete = self._complete = self._keep_alive = True
        self.fields = known.fields
        if length:
            self._pieces.append(data[start:])
        self._to_know = _KNOWN_ANSWERS
        return True

    def _get_to_know(self, data: bytes) -> None:
        """The head that `data`, a whole answer, begins with, if nothing about it is odd."""
        if not self._keep_alive or self._no_body or self.content_length is None or self._error is not None:
            return
        self._to_know -= 1
        self.fields = AnswerFields(self.headers)
        known = KnownAnswer(self.status, self.reason, self.headers, self.fields)
        if known.head.was(data):
            self._known = known

    def _broken(self, raised: HttpParserUpgrade | HttpParserError) -> UpstreamError | None:
        """What llhttp refused. None: the answer is whole, only its connection is of no more use."""
        if isinstance(raised, HttpParserUpgrade):
            return UpstreamProtocolError("the worker switched protocols unasked")
        if self._complete:
            self._error = UpstreamProtocolError("the worker sent more than its answer")
            return None
        cause = raised.__context__ or raised
        return UpstreamProtocolError(f"the worker's answer is not valid HTTP ({cause})")

    def _bound_head(self, count: int) -> UpstreamError | None:
        """`count` more bytes have come of a head (and perhaps of what follows it)."""
        self._head_bytes += count
        if self._head_bytes <= HEAD_LIMIT_BYTES:
            return None
        if self._head_complete and sum([len(name) + len(value) for name, value in self.headers]) <= HEAD_LIMIT_BYTES:
            return None
        self._head_complete = False
        return UpstreamProtocolError(f"the worker's answer head is over {HEAD_LIMIT_BYTES} bytes")

    def _deliver(self) -> None:
        """Nothing is done twice: the end of the body takes the sink away."""
        sink = self._sink
        if sink is None:
            if not self._complete and sum(map(len, self._pieces)) > _UNREAD_LIMIT_BYTES:
                self.pause()
            return
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if not self._complete:
            if data:
                sink.write(data)
            return
        self._sink = None
        sink.end(data)
        owner, self._owner = self._owner, None
        if owner is not None:
            owner.ended()

    def eof_received(self) -> None:
        if self._head_complete and self._until_close and not self._complete:
            self._complete = True
            self._deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.busy and not (self._complete and self._owner is None):  # or its sink has failed at the end
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
        if len(self.headers) >= FIELDS_LIMIT:
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

    def on_message_complete(self) -> None:
        if self.status < 200:  # 100, 102, 103: the real answer follows
            self.headers = []
            self.reason = b""
        elif not self._until_close:
            self._complete = True


def _framing(headers: RawHeaders) -> tuple[bool, int | None]:
    """(the body ends with the connection, its length if stated). llhttp has refused contradictory fields."""
    chunked = False
    length: int | None = None
    coded = False
    for name, value in headers:
        if len(name) == _LEN_CONTENT_LENGTH and name.lower() == b"content-length":
            length = int(value)
        elif len(name) == _LEN_TRANSFER_ENCODING and name.lower() == b"transfer-encoding":
            coded = True
            chunked = value.lower().rstrip().endswith(b"chunked")
    if coded:
        return not chunked, None
    return length is None, length

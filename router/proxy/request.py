"""Requests as they arrive: framing by llhttp, and every check that must not be left to chance (no I/O, no clock).

llhttp is strict about lengths, chunk sizes, names, folding and line ends. What it lets pass and a second reader might
read otherwise is refused here: repeated framing fields, codings other than chunked, odd versions, DEL, bytes beyond
ASCII in a target (case 106).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar, overload

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from router.errors import RouterError
from router.proxy.headers import Screened
from router.proxy.known_head import KnownHead
from router.proxy.plan import RawHeaders

HEAD_LIMIT_BYTES: Final = 64 << 10
FIELD_LIMIT_BYTES: Final = 16 << 10
"""Of the target, and of each field's value."""
FIELDS_LIMIT: Final = 256
DISCARD_LIMIT_BYTES: Final = 256 << 10
"""Of a body nobody wants (the request was refused at its head): reading more to keep a connection is not worth it."""
_ONCE = frozenset({b"authorization", b"content-length", b"content-type", b"expect", b"host", b"transfer-encoding"})
T = TypeVar("T")

_KNOWN_HEADS: Final = 4
"""Heads that a connection gets to know; one whose heads differ each time is not worth more."""
_NOT_HTTP = "the request is not well-formed HTTP"


class BodyBudget:
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


class RequestFields(Mapping[str, str]):
    """A request's fields by name, in any case; the first value where a name is repeated. `raw` has them all."""

    __slots__ = ("_first", "raw")

    def __init__(self, raw: RawHeaders) -> None:
        """Raises ValueError when a field that must be single is repeated."""
        self.raw = raw
        first: dict[bytes, bytes] = {}
        self._first = first
        for name, value in raw:
            lower = name.lower()
            if lower not in first:
                first[lower] = value
            elif lower in _ONCE:
                raise ValueError("repeated field")

    def with_length(self, raw: RawHeaders, value: bytes) -> RequestFields:
        """The same fields with another Content-Length, as `raw` has them."""
        fields = RequestFields([])
        fields.raw = raw
        fields._first = self._first.copy()
        fields._first[b"content-length"] = value
        return fields

    def raw_value(self, lower_name: bytes) -> bytes | None:
        return self._first.get(lower_name)

    def all(self, lower_name: bytes) -> list[str]:
        """Every value of that name, in order."""
        if lower_name not in self._first:
            return []
        return [_text(value) for name, value in self.raw if name.lower() == lower_name]

    def __getitem__(self, name: str) -> str:
        return _text(self._first[name.lower().encode("utf-8", "surrogateescape")])

    @overload
    def get(self, name: str) -> str | None: ...
    @overload
    def get(self, name: str, default: str | T) -> str | T: ...
    def get(self, name: str, default: str | T | None = None) -> str | T | None:
        value = self._first.get(name.lower().encode("utf-8", "surrogateescape"))
        return default if value is None else value.decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        return map(_text, self._first)

    def __len__(self) -> int:
        return len(self._first)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogateescape")


class Request:
    """One request: complete as far as its head, its body as far as it has come.

    `failure` is why there will be no body (or, `refused`, no request at all); nothing that follows on its connection is
    read then. `changed` is called once, when `complete` or `failure` is set.
    """

    __slots__ = (
        "_budget",
        "_discarded",
        "_held",
        "_pieces",
        "changed",
        "complete",
        "failure",
        "fields",
        "http11",
        "keep_alive",
        "known",
        "length",
        "method",
        "refused",
        "target",
    )

    def __init__(self, method: str, target: str, fields: RequestFields, budget: BodyBudget) -> None:
        self.method = method
        self.target = target
        self.fields = fields
        self.http11 = True
        self.keep_alive = False
        self.length: int | None = None
        """Bytes of the body as the client announced them; None when chunked or without a body."""
        self.known: KnownRequest | None = None
        """The head, when the connection had it before."""
        self.complete = False
        self.refused = False
        self.failure: RouterError | None = None
        self.changed: Callable[[], None] | None = None
        self._budget = budget
        self._pieces: list[bytes] | None = []
        self._held = 0
        self._discarded = 0

    @property
    def body_begun(self) -> bool:
        return self._held > 0

    def add(self, data: bytes, limit: int) -> bool:
        """One piece of the body. False: it cannot be kept, and `failure` says why."""
        if self._pieces is None:
            self._discarded += len(data)
            if self._discarded > DISCARD_LIMIT_BYTES:
                self.fail(RouterError("body_too_large", "the rest of a refused request is too long to be read"))
        elif self._held + len(data) > limit:
            self.fail(too_large(limit))
        else:
            try:
                self._budget.take(len(data))
            except RouterError as error:
                self.fail(error)
            else:
                self._held += len(data)
                self._pieces.append(data)
        return self.failure is None

    def end(self) -> None:
        self.complete = True
        self._tell()

    def fail(self, error: RouterError) -> None:
        """What came of the body is dropped."""
        self.release()
        self.failure = error
        self._tell()

    def _tell(self) -> None:
        if self.changed is not None:
            self.changed()
            self.changed = None

    def body(self) -> bytes:
        """The whole body, once it is complete. It counts in the budget until `release`."""
        pieces = self._pieces or []
        if len(pieces) > 1:
            pieces[:] = [b"".join(pieces)]
        return pieces[0] if pieces else b""

    def release(self) -> None:
        """The body is not needed any more, nor what may still come of it."""
        self._budget.give(self._held)
        self._held = 0
        self._pieces = None


class KnownRequest:
    """A POST whose head the connection may see again."""

    __slots__ = ("_fields", "_method", "_target", "head", "screened")

    def __init__(self, request: Request) -> None:
        self._method = request.method
        self._target = request.target
        self._fields = request.fields
        first_line = b"%b %b HTTP/1.1" % (request.method.encode(), request.target.encode())
        self.head = KnownHead(first_line, request.fields.raw)
        self.screened: Screened | None = None
        """What the listener made of the head."""

    def again(self, digits: bytes, length: int, budget: BodyBudget) -> Request:
        raw = self.head.fields(digits)
        fields = self._fields if raw is self._fields.raw else self._fields.with_length(raw, digits)
        request = Request(self._method, self._target, fields, budget)
        request.known = self
        request.keep_alive = True
        request.length = length
        return request


def too_large(limit: int) -> RouterError:
    return RouterError("body_too_large", f"the body is over {limit} bytes (listen.max_body_mb)")


class RequestParser:
    """The requests of one connection. `feed` it; `arrived` has every request whose head is complete, in order.

    `ended`: nothing that follows is a request (a refusal, or the client asked for the connection's end).
    """

    def __init__(self, max_body_bytes: int, budget: BodyBudget) -> None:
        self.arrived: deque[Request] = deque()
        self.ended = False
        self.in_head = False
        """Some bytes of a head have come, and not its end."""
        self._limit = max_body_bytes
        self._budget = budget
        self._parser = HttpRequestParser(self)
        self._open: Request | None = None
        self._offering: Request | None = None
        """Offers another protocol, and has a body."""
        self._target = b""
        self._fields: RawHeaders = []
        self._head_bytes = 0
        self._body_bytes = 0
        self._spare_bytes = 0
        self._noise = False
        self._known: KnownRequest | None = None
        self._to_know = _KNOWN_HEADS
        self._owed_bytes = 0
        """What is to come of the body of a request with a known head, which llhttp has not seen."""

    @property
    def quiet(self) -> bool:
        """All that came so far was requests, and they came to their ends."""
        return self._open is None and not self._noise and not self.in_head

    def feed(self, data: bytes) -> None:
        """Never raises: what is wrong becomes the `failure` of a request."""
        if self.ended:
            self._noise = True
            return
        if self._owed_bytes:
            data = self._take_owed(data)
        elif self.in_head or self._open is not None:
            self._parse(data)
            return
        known = self._known
        if known is not None and data:  # once: to cut off request after request would copy the rest each time
            rest = self._repeated(known, data)
            if rest is not None:
                data = rest
        if not data:
            return
        if self.ended:
            self._noise = True
            return
        count = len(self.arrived)
        self._parse(data)
        if self._to_know and len(self.arrived) > count:
            self._get_to_know(self.arrived[count], data)

    def _repeated(self, known: KnownRequest, data: bytes) -> bytes | None:
        """What stands behind the request that `data` begins with; None when it has another head."""
        if self.ended or self._owed_bytes:
            return None
        digits, start = known.head.find(data)
        if not start:
            return None
        length = int(digits)
        if length > self._limit:
            return None
        request = known.again(digits, length, self._budget)
        self.arrived.append(request)
        self._open = request
        self._owed_bytes = length
        return self._take_owed(data[start:])

    def _take_owed(self, data: bytes) -> bytes:
        """The body of a request with a known head; what stands behind it is returned."""
        request, owed = self._open, self._owed_bytes
        assert request is not None
        piece = data if len(data) <= owed else data[:owed]
        if piece and not request.add(piece, self._limit):
            self.ended = True
        self._owed_bytes = owed - len(piece)
        if self._owed_bytes:
            return b""
        self._open = None
        if not self.ended:
            request.end()
        return data[len(piece) :] if len(data) > owed else b""

    def _get_to_know(self, request: Request, data: bytes) -> None:
        """The head that `data` begins with, if nothing about it is odd."""
        named = request.fields.raw_value
        if not (request.keep_alive and request.http11 and request.method == "POST" and request.length is not None):
            return
        if named(b"expect") is not None or named(b"upgrade") is not None:
            return
        self._to_know -= 1
        known = KnownRequest(request)
        if known.head.was(data):
            self._known = known

    def _parse(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        try:
            head, body = self._fields if self.in_head else None, self._open
            while True:
                try:
                    self._parser.feed_data(rest)
                    break
                except HttpParserUpgrade as upgrade:
                    rest = memoryview(rest)[upgrade.args[0] :]
                    self._go_on()
            if self.in_head:
                if self._fields is head:
                    self._bound_head(len(data))
            elif self._open is not None and self._open.length is None:
                self._bound_chunks(len(data) if self._open is body else 0)
        except HttpParserError as error:
            self._noise = True
            if not self.ended:
                self._refuse(str(error.__context__) if isinstance(error.__context__, _Odd) else _NOT_HTTP)

    def _go_on(self) -> None:
        """An offer of another protocol (h2c) is not taken, so what follows is HTTP. httptools skips such a request's
        body: a new parser is told its framing."""
        self._parser = HttpRequestParser(self)
        request = self._offering
        if request is not None:
            length = request.length
            framing = b"Transfer-Encoding: chunked" if length is None else b"Content-Length: %d" % length
            self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)

    def _bound_head(self, count: int) -> None:
        """`count` bytes of nothing but one head: llhttp keeps an unfinished field, however long."""
        self._head_bytes += count
        if self._head_bytes > HEAD_LIMIT_BYTES:
            self._refuse(f"the request's head is over {HEAD_LIMIT_BYTES} bytes")

    def _bound_chunks(self, count: int) -> None:
        """`count` bytes of nothing but one chunked body (0: its head, and others' bytes, came along). llhttp keeps an
        unfinished field of its trailer and ignores chunk extensions, however long."""
        self._spare_bytes = max(0, self._spare_bytes + count - 9 * self._body_bytes)
        self._body_bytes = 0  # a chunk of one byte is framed by five more, which is fair
        if self._spare_bytes > HEAD_LIMIT_BYTES:
            self._refuse("the body's chunks are mostly something else")

    def _refuse(self, text: str) -> None:
        self.ended = True
        broken = self._open
        if broken is not None:
            broken.fail(RouterError("bad_request", "the body is not framed as its fields say"))
            return
        broken = Request("-", "", RequestFields([]), self._budget)
        broken.refused = True
        broken.fail(RouterError("bad_request", text))
        self.arrived.append(broken)

    # --- llhttp

    def on_message_begin(self) -> None:
        if self.ended:
            raise _Odd("more after the last request")
        self.in_head = True
        self._target = b""
        self._fields = []
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_head:
            return  # trailers end here: they are hop-by-hop for a proxy that re-frames
        fields = self._fields
        self._head_bytes += len(name) + len(value)
        if len(value) > FIELD_LIMIT_BYTES or self._head_bytes > HEAD_LIMIT_BYTES or len(fields) >= FIELDS_LIMIT:
            raise _Odd("the request's head is too large")
        if b"\x7f" in value:
            raise _Odd(_NOT_HTTP)
        fields.append((name, value))

    def on_headers_complete(self) -> None:
        self.in_head = False
        if self._offering is not None:
            self._open, self._offering = self._offering, None
            return
        target = self._target
        version = self._parser.get_http_version()
        if version not in ("1.1", "1.0") or len(target) > FIELD_LIMIT_BYTES or not target.isascii():
            raise _Odd(_NOT_HTTP)
        try:
            fields = RequestFields(self._fields)
        except ValueError:
            raise _Odd(_NOT_HTTP) from None
        request = Request(self._parser.get_method().decode("ascii"), target.decode("ascii"), fields, self._budget)
        length, coding = fields.raw_value(b"content-length"), fields.raw_value(b"transfer-encoding")
        request.http11 = version == "1.1"
        if coding is not None and (
            coding.strip().lower() != b"chunked" or length is not None or not request.http11
        ):  # a body gzipped for its transfer would reach the worker as if it were plain
            raise _Odd("the only transfer coding that is taken is chunked")
        request.keep_alive = self._parser.should_keep_alive()
        self._spare_bytes = self._body_bytes = 0
        self._open = request
        self.arrived.append(request)
        if length is not None:
            request.length = int(length)
            if request.length > self._limit:
                self.ended = True
                request.fail(too_large(self._limit))
        if (length or coding) and self._parser.should_upgrade():
            self._offering = request

    def on_body(self, data: bytes) -> None:
        request = self._open
        if request is None or self.ended:
            return
        self._body_bytes += len(data)
        if not request.add(data, self._limit):
            self.ended = True

    def on_message_complete(self) -> None:
        if self._offering is not None:
            return
        request, self._open = self._open, None
        if request is None or self.ended:
            return
        self.ended = not request.keep_alive
        request.end()


class _Odd(ValueError):
    """Raised into llhttp: the text is for the client."""

"""One placement of one request: from the worker's first byte to the client's last, with one end for all that happens.

Knows no HTTP server: the client's side is the small `Client` protocol, so the listener can be replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from router.proxy.connection import Connection, UpstreamError, UpstreamReset
from router.proxy.headers import AnswerFields, lines_of
from router.proxy.pair import PairResponse
from router.proxy.plan import FAULTS, OVERLOADED, Fault, Outcome, Placement, RawHeaders, Usage, outcome_of
from router.proxy.prefill_leg import Refusal
from router.proxy.upstream import UpstreamResponse
from router.proxy.usage import UsageTap

log = logging.getLogger("router.proxy")

CLIENT_CLOSED_STATUS: Final = 499
"""nginx's status for a client that left before its answer began; it never goes on the wire."""

_NO_BODY = frozenset({204, 304})

Response = Connection | UpstreamResponse | PairResponse | Refusal
"""Of one worker, or of a pair."""


class Incoming:
    """A request whose body is complete and whose sender was admitted."""

    __slots__ = ("body", "fields", "kept", "lines", "priority", "request_id", "route", "target")

    def __init__(
        self,
        route: str,
        target: bytes,
        fields: Mapping[str, str],
        kept: RawHeaders,
        body: bytes,
        request_id: str,
        priority: int = 0,
        lines: bytes | None = None,
    ) -> None:
        """`target`: path and query, byte for byte as the client sent them. `kept`: the client's fields that may go to a
        worker, `lines` the same as they go on the wire. A larger `priority` waits less for room on a worker."""
        self.route = route
        self.target = target
        self.fields = fields
        self.kept = kept
        self.body = body
        self.request_id = request_id
        self.priority = priority
        self.lines = lines_of(kept) if lines is None else lines


class Throttled(Protocol):
    """What a full client connection holds back."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Client(Protocol):
    """The client's side of an exchange. No call blocks, none raises when the client has gone."""

    def begin(self, status: int, reason: bytes, lines: bytes, length: int | None, has_body: bool) -> None:
        """Queue the head; `lines` are its fields as they go on the wire. `length` None: the body is chunked. The head
        leaves with the first piece of the body, or with `flush`."""

    def flush(self) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self, data: bytes) -> None:
        """The last piece, and the proper end of the body."""

    def abort(self) -> None:
        """Cut the connection, so that the client sees that its answer is not complete."""

    def throttle(self, source: Throttled | None) -> None:
        """Pause `source` while the client reads too slowly (case 77); None: nothing is left to pause."""


class Story:
    """What is known so far of a request's end; the listener makes a RequestRecord of it.

    Here and in Attempt most values at the start are the class's: setting each would cost as much as all the rest.
    """

    answered: bool = False
    """The head of an answer was given to the client: its status cannot change any more."""
    error: str | None = None
    worker: str | None = None
    attempts: int = 0
    first_byte_at: float | None = None
    queued_s: float | None = None
    usage: Usage | None = None

    def __init__(self) -> None:
        self.outcome = Outcome.CLIENT_CLOSED
        self.status = CLIENT_CLOSED_STATUS


class Waiter(Protocol):
    """Whoever had a request sent by `Forwarder.start`. One of these calls comes, once; none may raise."""

    def over(self) -> None:
        """The answer has ended, well or broken off, and the story with it."""

    def refused(self, error: Exception) -> None:
        """No worker's answer was begun: a RouterError, or a fault of ours; the latter may come later, too."""

    def go_on(self) -> None:
        """Something has to be waited for: `Forwarder.go_on` is to be awaited."""


class Attempt:
    """A placement together with the promise to finish it exactly once, and the sink between its worker's answer and
    the client: counts, looks for usage, passes every piece on at once.

    With a `waiter` it is the owner of the worker's connection as well: what the worker does moves it on, and no
    coroutine is woken for it, which would cost more than all that happens here.
    """

    _finished: bool = False
    _unread: bool = False
    """The first byte of a good answer is still to come. Of an error answer it is no first token."""
    connection: Connection | None = None
    """That the request was sent on without waiting, until it has failed there."""
    unanswered: bool = False
    """It failed there with nothing of an answer; the worker may have closed it while it was idle."""
    begun: bool = False
    """The answer's head was given to the client."""
    _throttles: bool = False
    """The client may hold the worker back."""
    complete: bool = False
    broke_off: bool = False
    _tap: UsageTap | None = None

    def __init__(
        self,
        placement: Placement,
        incoming: Incoming,
        client: Client,
        story: Story,
        clock: Callable[[], float],
        ended: Callable[[], None],
        waiter: Waiter | None,
    ) -> None:
        """`ended` is called after the placement was finished: its worker has room again."""
        self.placement = placement
        self._incoming = incoming
        self._client = client
        self._story = story
        self._clock = clock
        self._ended = ended
        self._waiter = waiter

    def finish(
        self, outcome: Outcome, *, fault: Fault | None = None, status: int | None = None, usage: Usage | None = None
    ) -> None:
        if not self._finished:
            self._finished = True
            self.placement.finish(outcome, fault=fault, status=status, usage=usage)
            self._ended()

    # --- the answer

    def begin(self, response: Response) -> None:
        """Give the answer's head to the client. Its body is to be piped here."""
        client, story, status = self._client, self._story, response.status
        fields = response.fields if isinstance(response, Connection) else None
        if fields is None:
            fields = AnswerFields(response.headers)
        lines = fields.lines
        if self.placement.route_headers:
            lines += lines_of(self.placement.route_headers)
        self._tap = UsageTap(self._incoming.route, fields.content_type, fields.content_encoding)
        self._unread = status < 400
        self.begun = True
        story.status, story.answered = status, True
        client.begin(status, response.reason, lines, response.content_length, status not in _NO_BODY)
        if isinstance(response, Connection) and response.whole:
            return
        self._throttles = True
        client.throttle(response)
        if not response.has_data:
            client.flush()

    def write(self, data: bytes) -> None:
        if self._unread:
            self._first_byte()
        assert self._tap is not None
        self._tap.feed(data)
        self._client.write(data)

    def end(self, data: bytes) -> None:
        tap = self._tap
        assert tap is not None
        if data:
            if self._unread:
                self._first_byte()
            tap.feed(data)
        self.complete = True
        if tap.expects_mark and self._story.status < 400 and tap.broke_off():
            self.broke_off = True
            if not tap.names_error():  # an error event tells the client; silence must not look complete
                self._client.write(data)
                self._client.abort()
                return
        self._client.end(data)

    def _first_byte(self) -> None:
        self._unread = False
        self._story.first_byte_at = self._clock()
        self.placement.first_byte()

    def conclude(self) -> None:
        """The answer came to its end."""
        story = self._story
        status = story.status
        story.usage = self._tap.result() if self._tap is not None else None
        story.outcome = Outcome.STREAM_ERROR if self.broke_off else outcome_of(status)
        self.finish(story.outcome, fault=FAULTS.get(status), status=status, usage=story.usage)

    def cut_off(self, error: UpstreamError) -> None:
        """The worker failed in the middle of its answer."""
        self._client.abort()
        self._story.outcome = Outcome.STREAM_ERROR
        self.finish(Outcome.STREAM_ERROR, fault=error.fault, status=self._story.status)
        log.warning("answer of %s broke off: %s", self.placement.url.text, error)

    def no_answer(self, error: UpstreamError) -> None:
        """The worker failed before its answer began."""
        self.finish(Outcome.UPSTREAM_ERROR, fault=error.fault)
        pair, where = self.placement.pair, self.placement.url.text
        if pair is not None:
            where = f"{pair.prefill.url.text} with {where}"
        log.warning("request %s: %s: %s", self._incoming.request_id, where, error)

    # --- owner of a connection

    def head_came(self) -> None:
        connection, waiter = self.connection, self._waiter
        assert connection is not None
        assert waiter is not None
        if connection.status in OVERLOADED:
            connection.disown()
            waiter.go_on()
            return
        try:
            self.begin(connection)
            connection.attach(self)
        except Exception as error:
            if self.connection is None:  # the end was told
                raise
            self._crashed(error)

    def ended(self) -> None:
        try:
            self.conclude()
        except Exception as error:
            self._crashed(error)
        else:
            self._part()
            assert self._waiter is not None
            self._waiter.over()

    def failed(self, error: UpstreamError) -> None:
        connection, waiter = self.connection, self._waiter
        assert connection is not None
        assert waiter is not None
        if not self.begun and isinstance(error, UpstreamReset) and not connection.got_bytes:
            self._part()
            self.unanswered = True
            waiter.go_on()
            return
        try:
            if self.begun:
                self.cut_off(error)
            else:
                self.no_answer(error)
        except Exception as crash:  # must not reach the sweep that found a silent worker
            self._crashed(crash)
            return
        self._part()
        if self.begun:
            waiter.over()
        else:
            waiter.refused(error.to_client())

    def cancel(self) -> None:
        """The client has gone, and nobody waits."""
        try:
            self.finish(Outcome.CLIENT_CLOSED, status=self._story.status if self.begun else None)
        finally:
            self._part()

    def _crashed(self, error: Exception) -> None:
        self.finish(Outcome.UPSTREAM_ERROR, status=self._story.status if self.begun else None)
        self._part()
        assert self._waiter is not None
        self._waiter.refused(error)

    def _part(self) -> None:
        connection, self.connection = self.connection, None
        if self._throttles:
            self._client.throttle(None)
        if connection is not None:
            connection.release()

"""One request's way through: plan → place → send → relay, with its retries and its one terminal outcome.

Knows no HTTP server: the client's side is the small `Client` protocol, so the listener can be replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from router.errors import RouterError
from router.proxy.connection import UpstreamConnectError, UpstreamError
from router.proxy.headers import AnswerFields, for_worker
from router.proxy.pair import PairResponse, PairSender
from router.proxy.plan import FAULTS, OVERLOADED, Core, Fault, Outcome, Placement, RawHeaders, Usage, outcome_of
from router.proxy.prefill_leg import Refusal
from router.proxy.queue import QueueOptions, WaitQueue
from router.proxy.upstream import UpstreamClient, UpstreamResponse
from router.proxy.usage import UsageTap

log = logging.getLogger("router.proxy")

MAX_CONNECT_TRIES = 3
LARGE_BODY_BYTES = 512 << 10
CLIENT_CLOSED_STATUS = 499
"""nginx's status for a client that left before its answer began; it never goes on the wire."""

_NO_BODY = frozenset({204, 304})

P = TypeVar("P")
Response = UpstreamResponse | PairResponse | Refusal
"""Of one worker, or of a pair."""


@dataclass(slots=True)  # not frozen: that costs 2 µs a request
class Incoming:
    """A request whose body is complete and whose sender was admitted."""

    route: str
    target: bytes
    """Path and query, byte for byte as the client sent them."""
    fields: Mapping[str, str]
    kept: RawHeaders
    """The client's fields that may go to a worker."""
    body: bytes
    request_id: str
    priority: int = 0
    """Larger waits less for room on a worker."""


class Throttled(Protocol):
    """What a full client connection holds back."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Client(Protocol):
    """The client's side of an exchange. No call blocks, none raises when the client has gone."""

    def begin(self, status: int, reason: bytes, fields: RawHeaders, length: int | None, *, has_body: bool) -> None:
        """Queue the head. `length` None: the body is chunked. It leaves with the first piece, or with `flush`."""

    def flush(self) -> None: ...
    def write(self, data: bytes) -> None: ...
    def end(self, data: bytes) -> None:
        """The last piece, and the proper end of the body."""

    def abort(self) -> None:
        """Cut the connection, so that the client sees that its answer is not complete."""

    def throttle(self, source: Throttled | None) -> None:
        """Pause `source` while the client reads too slowly (case 77); None: nothing is left to pause."""


class Attempt:
    """A placement together with the promise to finish it exactly once."""

    __slots__ = ("_ended", "_finished", "placement")

    def __init__(self, placement: Placement, ended: Callable[[], None]) -> None:
        """`ended` is called after the placement was finished: its worker has room again."""
        self.placement = placement
        self._ended = ended
        self._finished = False

    def finish(
        self, outcome: Outcome, *, fault: Fault | None = None, status: int | None = None, usage: Usage | None = None
    ) -> None:
        if not self._finished:
            self._finished = True
            self.placement.finish(outcome, fault=fault, status=status, usage=usage)
            self._ended()


class Story:
    """What is known so far of a request's end; the listener makes a RequestRecord of it."""

    __slots__ = ("answered", "attempts", "error", "first_byte_at", "outcome", "queued_s", "status", "usage", "worker")

    def __init__(self) -> None:
        self.outcome = Outcome.CLIENT_CLOSED
        self.status = CLIENT_CLOSED_STATUS
        self.answered = False
        """The head of an answer was given to the client: its status cannot change any more."""
        self.error: str | None = None
        self.worker: str | None = None
        self.attempts = 0
        self.first_byte_at: float | None = None
        self.queued_s: float | None = None
        self.usage: Usage | None = None


class Relay:
    """The sink between a worker's answer and the client: counts, looks for usage, passes every piece on at once."""

    __slots__ = ("_client", "_clock", "_placement", "_story", "_tap", "broke_off", "ended")

    def __init__(
        self, client: Client, tap: UsageTap, story: Story, placement: Placement | None, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._tap = tap
        self._story = story
        self._placement = placement
        """None for an error status: its bytes are no first token, and its end has no mark."""
        self._clock = clock
        self.ended = False
        self.broke_off = False

    def write(self, data: bytes) -> None:
        self._take(data)
        self._client.write(data)

    def end(self, data: bytes) -> None:
        if data:
            self._take(data)
        self.ended = True
        if self._placement is not None and self._tap.broke_off():
            self.broke_off = True
            if not self._tap.names_error():  # an error event tells the client; silence must not look complete
                self._client.write(data)
                self._client.abort()
                return
        self._client.end(data)

    def _take(self, data: bytes) -> None:
        if self._story.first_byte_at is None and self._placement is not None:
            self._story.first_byte_at = self._clock()
            self._placement.first_byte()
        self._tap.feed(data)


class Forwarder(Generic[P]):
    """Carries requests from `Client` to workers as `core` decides."""

    def __init__(
        self, core: Core[P], upstream: UpstreamClient, queue: QueueOptions, *, clock: Callable[[], float]
    ) -> None:
        self._core = core
        self._upstream = upstream
        self._clock = clock
        self._queue = WaitQueue(core, queue)
        self._pairs = PairSender(upstream, released=self._queue.released)

    @property
    def prefill_legs(self) -> int:
        """Requests to prefill engines that have not ended, those of clients that left included."""
        return self._pairs.legs

    @property
    def waiting(self) -> int:
        """Requests that wait for room on a worker."""
        return self._queue.waiting

    async def forward(self, incoming: Incoming, client: Client, story: Story) -> None:
        """Answer one request. `story` is up to date however this ends.

        Raises RouterError when no worker's answer was begun; cancellation means that the client has gone.
        """
        plan = await self._core.plan(incoming.route, incoming.fields, incoming.body, incoming.request_id)
        attempt, response = await self._answer_of_some_worker(plan, incoming, story)
        try:
            await self._relay(incoming.route, attempt, response, client, story)
        except asyncio.CancelledError:
            attempt.finish(Outcome.CLIENT_CLOSED, status=response.status)
            raise
        except Exception:
            attempt.finish(Outcome.UPSTREAM_ERROR, status=response.status)
            raise
        finally:
            client.throttle(None)
            response.close()

    async def _answer_of_some_worker(self, plan: P, incoming: Incoming, story: Story) -> tuple[Attempt, Response]:
        """The first answer that is to be passed on. Another worker is tried only while no work can have been accepted.

        That is after a connect failure, and once after a 429 or 503, whose answer is kept in case no other can serve.
        """
        refused: tuple[Attempt, Response] | None = None
        unreachable: UpstreamConnectError | None = None
        tried: set[str] = set()
        connect_tries = 0
        keep_refused = False
        try:
            while connect_tries < MAX_CONNECT_TRIES:
                try:
                    without = frozenset(tried)
                    if refused is not None:  # a second try is made where there is room, or not at all
                        chosen: Placement | None = self._core.place(plan, without)
                    else:
                        chosen = self._queue.try_place(plan, without)
                    if chosen is None:
                        chosen = await self._wait_for_room(plan, without, incoming, story)
                    attempt = Attempt(chosen, self._queue.released)
                except RouterError:
                    if refused is None and unreachable is None:
                        raise
                    break
                try:
                    response = await self._send(attempt, incoming, story)
                except UpstreamConnectError as error:
                    tried.update(attempt.placement.to_avoid)
                    unreachable = error
                    connect_tries += 1
                    continue
                if response.status not in OVERLOADED or refused is not None:
                    return attempt, response
                attempt.finish(Outcome.REJECTED, status=response.status)
                tried.update(attempt.placement.to_avoid)
                refused = (attempt, response)
            if refused is not None:
                keep_refused = True
                story.worker = _named(refused[0].placement)
                return refused
            assert unreachable is not None
            raise unreachable.to_client()
        finally:
            if refused is not None and not keep_refused:
                refused[1].close()

    async def _wait_for_room(self, plan: P, without: frozenset[str], incoming: Incoming, story: Story) -> Placement:
        arrived_at = self._clock()
        try:
            return await self._queue.wait(plan, without, incoming.priority)
        finally:
            story.queued_s = self._clock() - arrived_at

    async def _send(self, attempt: Attempt, incoming: Incoming, story: Story) -> Response:
        """One worker's answer head. The attempt is finished when this raises."""
        placement = attempt.placement
        pair = placement.pair
        story.worker = _named(placement)
        story.attempts += 1
        try:
            if pair is not None:
                return await self._pairs.send(pair, incoming)
            if len(placement.body) > LARGE_BODY_BYTES:
                await asyncio.sleep(0)  # handing megabytes to the kernel takes a turn of its own
            fields = for_worker(incoming.kept, incoming.request_id, placement.authorization, placement.headers)
            return await self._upstream.send(placement.url, b"POST", incoming.target, fields, placement.body)
        except UpstreamError as error:
            attempt.finish(Outcome.UPSTREAM_ERROR, fault=error.fault)
            where = placement.url.text if pair is None else f"{pair.prefill.url.text} with {placement.url.text}"
            log.warning("request %s: %s: %s", incoming.request_id, where, error)
            if isinstance(error, UpstreamConnectError):
                raise
            raise error.to_client() from error
        except asyncio.CancelledError:
            attempt.finish(Outcome.CLIENT_CLOSED)
            raise
        except Exception:
            attempt.finish(Outcome.UPSTREAM_ERROR)
            raise

    async def _relay(self, route: str, attempt: Attempt, response: Response, client: Client, story: Story) -> None:
        status = response.status
        answer = AnswerFields(response.headers)
        answer.kept.extend(attempt.placement.route_headers)
        tap = UsageTap(route, answer.content_type, answer.content_encoding)
        relay = Relay(client, tap, story, attempt.placement if status < 400 else None, self._clock)
        story.status, story.answered = status, True
        client.begin(status, response.reason, answer.kept, response.content_length, has_body=status not in _NO_BODY)
        client.throttle(response)
        if not response.has_data:
            client.flush()
        try:
            await response.pipe(relay)
        except UpstreamError as error:
            client.abort()
            story.outcome = Outcome.STREAM_ERROR
            attempt.finish(story.outcome, fault=error.fault, status=status)
            log.warning("answer of %s broke off: %s", attempt.placement.url.text, error)
        except asyncio.CancelledError:
            if relay.ended:
                self._finish(attempt, relay, tap, story)
            raise
        else:
            self._finish(attempt, relay, tap, story)

    def _finish(self, attempt: Attempt, relay: Relay, tap: UsageTap, story: Story) -> None:
        story.usage = tap.result()
        story.outcome = Outcome.STREAM_ERROR if relay.broke_off else outcome_of(story.status)
        attempt.finish(story.outcome, fault=FAULTS.get(story.status), status=story.status, usage=story.usage)


def _named(placement: Placement) -> str:
    """What a request's record calls its worker: of a pair, the one the policy chose."""
    return placement.url.text if placement.pair is None else placement.pair.prefill.url.text

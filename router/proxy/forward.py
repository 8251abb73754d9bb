"""One request's way through: plan → place → send → relay, with its retries and its one terminal outcome.

`start` goes it without waiting, as far as it goes; `go_on` and `forward` are for all that has to be waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from router.errors import RouterError
from router.proxy.attempt import Attempt, Client, Incoming, Story, Waiter
from router.proxy.connection import AT_ONCE_BYTES, UpstreamConnectError, UpstreamError
from router.proxy.headers import for_worker, lines_of
from router.proxy.pair import PairResponse, PairSender
from router.proxy.plan import OVERLOADED, Core, Outcome, Placement, Unplanned
from router.proxy.prefill_leg import Refusal
from router.proxy.queue import QueueOptions, Waiting, WaitQueue
from router.proxy.upstream import UpstreamClient, UpstreamResponse

MAX_CONNECT_TRIES: Final = 3
LARGE_BODY_BYTES: Final = 512 << 10
_LONG_BODY_BYTES: Final = 8 << 10
"""Planning a longer one takes longer than is saved by sending together with others."""

_NOT_TRIED: frozenset[str] = frozenset()

P = TypeVar("P")
Awaited = UpstreamResponse | PairResponse | Refusal


class Started(Generic[P]):
    """How far `Forwarder.start` came."""

    plan: P | None = None
    unplanned: Unplanned | None = None
    attempt: Attempt | None = None
    waits: Waiting[P] | None = None
    """Its place in the line for room on a worker."""
    waits_since: float = 0.0

    def __init__(self, incoming: Incoming, client: Client, story: Story, queue: WaitQueue[P]) -> None:
        self.incoming = incoming
        self.client = client
        self.story = story
        self._queue = queue

    def cancel(self) -> None:
        """The client has gone, and nobody awaits `go_on`."""
        if self.waits is not None:
            self._queue.leave(self.waits)
        if self.attempt is not None:
            self.attempt.cancel()


class Forwarder(Generic[P]):
    """Carries requests from `Client` to workers as `core` decides."""

    def __init__(
        self, core: Core[P], upstream: UpstreamClient, queue: QueueOptions, *, clock: Callable[[], float]
    ) -> None:
        self._core = core
        self._upstream = upstream
        self._clock = clock
        self._queue = WaitQueue(core, queue)
        self._released = self._queue.released
        self._pairs = PairSender(upstream, released=self._released)

    @property
    def prefill_legs(self) -> int:
        """Requests to prefill engines that have not ended, those of clients that left included."""
        return self._pairs.legs

    @property
    def waiting(self) -> int:
        """Requests that wait for room on a worker."""
        return self._queue.waiting

    # --- without waiting

    def start(self, incoming: Incoming, client: Client, story: Story, waiter: Waiter) -> Started[P]:
        """Plan, place and send a request; its answer passes by in the turns in which it comes.

        `waiter` is told of the end, or that `go_on` has to be awaited, perhaps before this returns. Raises RouterError
        when no worker can have it; `story` is up to date then.
        """
        started: Started[P] = Started(incoming, client, story, self._queue)
        if len(incoming.body) > _LONG_BODY_BYTES:
            self._upstream.turn.flush()
        plan = self._core.plan_now(incoming.route, incoming.fields, incoming.body, incoming.request_id)
        if isinstance(plan, Unplanned):
            started.unplanned = plan
            waiter.go_on()
            return started
        started.plan = plan
        placement = self._queue.try_place(plan, _NOT_TRIED)
        if placement is None:
            started.waits = self._join(plan, _NOT_TRIED, started)  # now: who comes later must not be placed before
            waiter.go_on()
            return started
        attempt = Attempt(placement, incoming, client, story, self._clock, self._released, waiter)
        started.attempt = attempt
        try:
            sent = self._send_now(attempt, placement, incoming)
        except Exception:
            story.worker = _named(placement)
            story.attempts = 1
            attempt.finish(Outcome.UPSTREAM_ERROR)
            raise
        if sent:
            story.worker = placement.url.text
            story.attempts = 1
        else:
            waiter.go_on()
        return started

    def _send_now(self, attempt: Attempt, placement: Placement, incoming: Incoming) -> bool:
        """False: it is large, or for a pair, or there is no connection yet."""
        body = placement.body
        if len(body) > AT_ONCE_BYTES or placement.pair is not None:
            return False
        authorization, extra = placement.authorization, placement.headers
        if authorization is None and not extra:
            lines = b"%bX-Request-Id: %b\r\n" % (incoming.lines, incoming.request_id.encode("ascii"))
        else:
            lines = lines_of(for_worker(incoming.kept, incoming.request_id, authorization, extra))
        attempt.connection = self._upstream.send_now(placement.url, incoming.target, lines, body, attempt)
        return attempt.connection is not None

    # --- with waiting

    async def forward(self, incoming: Incoming, client: Client, story: Story) -> None:
        """Answer one request. `story` is up to date however this ends.

        Raises RouterError when no worker's answer was begun; cancellation means that the client has gone.
        """
        await self.go_on(Started(incoming, client, story, self._queue))

    async def go_on(self, started: Started[P]) -> None:
        """As `forward`, from where `start` has come to."""
        incoming = started.incoming
        plan = started.plan
        if plan is None:
            plan = await self._core.plan(
                incoming.route, incoming.fields, incoming.body, incoming.request_id, started.unplanned
            )
        attempt, response = await self._answer_of_some_worker(plan, started)
        try:
            await self._relay(attempt, response)
        except asyncio.CancelledError:
            attempt.finish(Outcome.CLIENT_CLOSED, status=response.status)
            raise
        except Exception:
            attempt.finish(Outcome.UPSTREAM_ERROR, status=response.status)
            raise
        finally:
            started.client.throttle(None)
            response.close()

    async def _answer_of_some_worker(self, plan: P, started: Started[P]) -> tuple[Attempt, Awaited]:
        """The first answer that is to be passed on. Another worker is tried only while no work can have been accepted.

        That is after a connect failure, and once after a 429 or 503, whose answer is kept in case no other can serve.
        """
        story = started.story
        refused: tuple[Attempt, Awaited] | None = None
        unreachable: UpstreamConnectError | None = None
        tried: set[str] = set()
        connect_tries = 0
        keep_refused = False
        attempt = started.attempt
        try:
            while connect_tries < MAX_CONNECT_TRIES:
                if attempt is None:
                    try:
                        attempt = await self._place(plan, frozenset(tried), started, again=refused is not None)
                    except RouterError:
                        if refused is None and unreachable is None:
                            raise
                        break
                try:
                    response = await self._send(attempt, started.incoming, story)
                except UpstreamConnectError as error:
                    tried.update(attempt.placement.to_avoid)
                    unreachable = error
                    connect_tries += 1
                    attempt = None
                    continue
                if response.status not in OVERLOADED or refused is not None:
                    return attempt, response
                attempt.finish(Outcome.REJECTED, status=response.status)
                tried.update(attempt.placement.to_avoid)
                refused = (attempt, response)
                attempt = None
            if refused is not None:
                keep_refused = True
                story.worker = _named(refused[0].placement)
                return refused
            assert unreachable is not None
            raise unreachable.to_client()
        finally:
            if refused is not None and not keep_refused:
                refused[1].close()

    async def _place(self, plan: P, without: frozenset[str], started: Started[P], *, again: bool) -> Attempt:
        """`again`: a second try is made where there is room, or not at all."""
        waits, started.waits = started.waits, None
        if waits is None:
            chosen = self._core.place(plan, without) if again else self._queue.try_place(plan, without)
            if chosen is not None:
                return self._attempt(chosen, started)
            waits = self._join(plan, without, started)
        try:
            return self._attempt(await self._queue.stay(waits), started)
        finally:
            started.story.queued_s = self._clock() - started.waits_since

    def _join(self, plan: P, without: frozenset[str], started: Started[P]) -> Waiting[P]:
        started.story.queued_s = 0.0
        started.waits_since = self._clock()
        return self._queue.join(plan, without, started.incoming.priority)

    def _attempt(self, chosen: Placement, started: Started[P]) -> Attempt:
        return Attempt(chosen, started.incoming, started.client, started.story, self._clock, self._released, None)

    async def _send(self, attempt: Attempt, incoming: Incoming, story: Story) -> Awaited:
        """One worker's answer head. The attempt is finished when this raises."""
        if attempt.connection is not None:  # sent by `start`, and answered
            return UpstreamResponse(attempt.connection, reused=True)
        placement = attempt.placement
        pair = placement.pair
        story.worker = _named(placement)
        if not attempt.unanswered:
            story.attempts += 1
        try:
            if pair is not None:
                return await self._pairs.send(pair, incoming)
            if len(placement.body) > LARGE_BODY_BYTES:
                await asyncio.sleep(0)  # handing megabytes to the kernel takes a turn of its own
            fields = for_worker(incoming.kept, incoming.request_id, placement.authorization, placement.headers)
            if attempt.unanswered:
                return await self._upstream.send_again(placement.url, incoming.target, fields, placement.body)
            return await self._upstream.send(placement.url, b"POST", incoming.target, fields, placement.body)
        except UpstreamError as error:
            attempt.no_answer(error)
            if isinstance(error, UpstreamConnectError):
                raise
            raise error.to_client() from error
        except asyncio.CancelledError:
            attempt.finish(Outcome.CLIENT_CLOSED)
            raise
        except Exception:
            attempt.finish(Outcome.UPSTREAM_ERROR)
            raise

    async def _relay(self, attempt: Attempt, response: Awaited) -> None:
        attempt.begin(response)
        try:
            await response.pipe(attempt)
        except UpstreamError as error:
            attempt.cut_off(error)
        except asyncio.CancelledError:
            if attempt.complete:
                attempt.conclude()
            raise
        else:
            attempt.conclude()


def _named(placement: Placement) -> str:
    """What a request's record calls its worker: of a pair, the one the policy chose."""
    return placement.url.text if placement.pair is None else placement.pair.prefill.url.text

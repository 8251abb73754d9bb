"""What this router knows of one rank's work: its own requests in flight, its siblings' (other processes and replicas of
this router), and what the engine reports of itself.

Pure: every method that needs the time is given it (`now_s`, any monotonic clock). A request is counted from the moment
it is placed until its last byte, exactly once, on the object that was incremented (public cases 54 and 55). Fields that
`Policy.decide` reads for every rank of the fleet are plain attributes, kept current by the methods here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

REPORT_FRESH_S = 3.0
"""A load report older than this is not believed: SGLang sends one a second even when idle (contract, section 4)."""
RATE_FLOOR_TOKENS_PER_S = 50.0
RATE_CAP_TOKENS_PER_S = 200_000.0
"""Prefill speeds outside these bounds are nonsense. Too high a rate is catastrophic: a queue would look empty."""
MIN_MEASURED_TOKENS = 1024
"""Speed is taken from at least this many prefilled tokens: shorter spans measure overhead, not prefill."""
RATE_MEMORY_TOKENS = 200_000
"""Tokens over which a measured speed is smoothed: single prompts differ by context, the machine does not."""
RATE_MAX_STEP = 2.0
"""One measurement moves the speed upwards by at most this factor: a single absurd report must not empty a queue."""
MEAN_SMOOTHING = 0.05
NEVER_S = -math.inf


class Outstanding(NamedTuple):
    """What one router has under way on one rank."""

    requests: int
    tokens: int
    """Prompt tokens of those requests."""
    queued_uncached_tokens: int
    """Uncached tokens of those without a first byte."""
    decoding: int
    oldest_placed_s: float
    """When the oldest without a first byte was placed; infinite when there is none."""
    placed_uncached_tokens: int
    """Ever placed there: only grows, so that what a sibling sent since a load report is a difference."""


NOTHING = Outstanding(0, 0, 0, 0, math.inf, 0)


class Ticket:
    """One placed request. `waiting` until its first byte came; `done` after its last."""

    __slots__ = ("done", "load", "placed_s", "prompt_tokens", "uncached_tokens", "waiting")

    def __init__(self, load: RankLoad, prompt_tokens: int, uncached_tokens: int, placed_s: float) -> None:
        self.load = load
        self.prompt_tokens = prompt_tokens
        self.uncached_tokens = uncached_tokens
        self.placed_s = placed_s
        self.waiting = True
        self.done = False

    def first_byte(self) -> None:
        """The prefill is over: its tokens stop counting as queued work."""
        if self.waiting and not self.done:
            self.waiting = False
            load = self.load
            load._leave_queue(self)
            load.decoding += 1
            if load.on_change is not None:
                load.on_change()

    def let_go(self) -> None:
        """Its first byte will not be seen (router.policy.unseen): how long it waits says nothing from now on."""
        load = self.load
        load._waiting.pop(self, None)
        load.oldest_placed_s = min(load._own_oldest_s(), load._siblings_oldest_s)

    def finish(self) -> None:
        """The last byte went out, or the request failed. Safe to call more than once."""
        if self.done:
            return
        self.done = True
        load = self.load
        if self.waiting:
            load._leave_queue(self)
        else:
            load.decoding -= 1
        load.requests -= 1
        load.tokens -= self.prompt_tokens
        if load.on_change is not None:
            load.on_change()


@dataclass(slots=True)
class Report:
    """The engine's own view of one rank (LoadStat), reduced to what the cost uses."""

    received_s: float
    running: int
    waiting: int
    waiting_uncached_tokens: int | None = None
    prefill_total: tuple[int, int] | None = None
    """Cumulative (uncached prefill tokens, busy microseconds); engines before SGLang 0.5.22 do not send them."""


@dataclass(slots=True, eq=False)
class RankLoad:
    """In-flight work of one rank, its engine's last report, and its measured prefill speed.

    `requests` and `tokens` are this router's own. What the cost reads (`decoding`, `queued_uncached_tokens`,
    `oldest_placed_s`, `share_sum_tokens`, `reported_queue_tokens`) has the siblings' share in it already, so that a
    decision costs the same with and without them.
    """

    requests: int = 0
    tokens: int = 0
    """Prompt tokens of every own request from placement to its last byte."""
    sibling_requests: int = 0
    decoding: int = 0
    """Requests past their first byte."""
    queued_uncached_tokens: int = 0
    """Uncached prompt tokens of requests before their first byte, charged in full until then."""
    oldest_placed_s: float = math.inf
    """When the oldest request without a first byte was placed; infinite when there is none."""
    placed_uncached_tokens: int = 0
    """Uncached tokens of every own request ever placed here."""
    on_change: Callable[[], None] | None = None
    """Called when the own share of any of this changed."""
    report: Report | None = None
    reported_queue_tokens: int = 0
    """What the last report said is queued, plus what was placed here since, by siblings too."""
    reported_until_s: float = NEVER_S
    """Until then the report is believed."""
    prefill_tokens_per_s: float | None = None
    share_sum_tokens: float = 0.0
    """Decayed sum of the uncached tokens sent here, as of `share_at_s`; what was sent since is in it, grown by as much
    as it will decay from then on."""
    share_at_s: float = 0.0
    """A multiple of the decay's time, so that a decision finds one time for all ranks."""
    mean_uncached_tokens: float = 0.0
    """Smoothed uncached tokens of a request placed here; 0 before the first."""
    _measured_from: tuple[int, int] | None = None
    _waiting: dict[Ticket, None] = field(default_factory=dict)
    _siblings: dict[bytes, Outstanding] = field(default_factory=dict)
    _siblings_oldest_s: float = math.inf
    _decoding_unseen: int = 0

    def place(self, prompt_tokens: int, uncached_tokens: int, now_s: float, share_tau_s: float) -> Ticket:
        """Counts a request that was just sent here."""
        ticket = Ticket(self, prompt_tokens, uncached_tokens, now_s)
        self.requests += 1
        self.tokens += prompt_tokens
        self.queued_uncached_tokens += uncached_tokens
        self.placed_uncached_tokens += uncached_tokens
        self._sent_here(uncached_tokens, now_s, share_tau_s)
        mean = self.mean_uncached_tokens
        self.mean_uncached_tokens = mean + (MEAN_SMOOTHING if mean else 1.0) * (uncached_tokens - mean)
        self._waiting[ticket] = None
        if now_s < self.oldest_placed_s:
            self.oldest_placed_s = now_s
        if self.on_change is not None:
            self.on_change()
        return ticket

    def _sent_here(self, uncached_tokens: int, now_s: float, share_tau_s: float) -> None:
        self.reported_queue_tokens += uncached_tokens
        age_s = now_s - self.share_at_s
        if not 0 <= age_s < share_tau_s:
            since_s = now_s // share_tau_s * share_tau_s
            self.share_sum_tokens = self.share_tokens(since_s, share_tau_s)
            self.share_at_s = since_s
            age_s = now_s - since_s
        self.share_sum_tokens += uncached_tokens * math.exp(age_s / share_tau_s)

    def _leave_queue(self, ticket: Ticket) -> None:
        waiting = self._waiting
        waiting.pop(ticket, None)
        self.queued_uncached_tokens -= ticket.uncached_tokens
        oldest_s = self._own_oldest_s() if waiting else math.inf
        self.oldest_placed_s = oldest_s if oldest_s <= self._siblings_oldest_s else self._siblings_oldest_s

    def _own_oldest_s(self) -> float:
        for oldest in self._waiting:  # insertion order is age order
            return oldest.placed_s
        return math.inf

    def outstanding(self) -> Outstanding:
        """The own share, as siblings are told of it."""
        theirs = self._siblings.values()
        return Outstanding(
            self.requests,
            self.tokens,
            self.queued_uncached_tokens - sum(one.queued_uncached_tokens for one in theirs),
            self.decoding - self._decoding_unseen - sum(one.decoding for one in theirs),
            self._own_oldest_s(),
            self.placed_uncached_tokens,
        )

    def hear(self, sibling: bytes, theirs: Outstanding | None, now_s: float, share_tau_s: float) -> None:
        """What a sibling has under way here now, in place of what it said before; None: it is not heard any more.

        Times of `theirs` are of the caller's clock. What it placed since it last said so counts as sent since the
        engine's report: the report may be older or newer, and counting it twice for some milliseconds is harmless.
        """
        before = self._siblings.pop(sibling, None)
        if theirs is not None:
            self._siblings[sibling] = theirs
            if before is not None and theirs.placed_uncached_tokens > before.placed_uncached_tokens:
                self._sent_here(theirs.placed_uncached_tokens - before.placed_uncached_tokens, now_s, share_tau_s)
        was, now = before or NOTHING, theirs or NOTHING
        self.sibling_requests += now.requests - was.requests
        self.decoding += now.decoding - was.decoding
        self.queued_uncached_tokens += now.queued_uncached_tokens - was.queued_uncached_tokens
        self._siblings_oldest_s = min((one.oldest_placed_s for one in self._siblings.values()), default=math.inf)
        self.oldest_placed_s = min(self._own_oldest_s(), self._siblings_oldest_s)

    def decode_elsewhere(self, running: int) -> None:
        """The engine runs so many requests: those that nobody here counts are decodes of which only it tells."""
        unseen = max(0, running - (self.decoding - self._decoding_unseen))
        self.decoding += unseen - self._decoding_unseen
        self._decoding_unseen = unseen

    def heard_of(self, sibling: bytes) -> Outstanding:
        """What that sibling last said."""
        return self._siblings.get(sibling, NOTHING)

    def oldest_wait_s(self, now_s: float) -> float:
        """Age of the oldest request without a first byte; 0 when there is none."""
        return max(0.0, now_s - self.oldest_placed_s)

    def share_tokens(self, now_s: float, tau_s: float) -> float:
        """Decayed sum of the uncached tokens sent here: the long-term share (policy-study, term E)."""
        if not self.share_sum_tokens:
            return 0.0
        return self.share_sum_tokens * math.exp(-max(0.0, now_s - self.share_at_s) / tau_s)

    def queue_tokens(self, now_s: float, rate_tokens_per_s: float) -> float:
        """Uncached tokens ahead of a new prompt: the largest of what we queued, what the oldest wait implies, and what
        the engine reported plus what we sent since (it sees other routers' requests, public case 57)."""
        queue = max(float(self.queued_uncached_tokens), rate_tokens_per_s * self.oldest_wait_s(now_s))
        return max(queue, self.reported_queue_tokens) if now_s <= self.reported_until_s else queue

    def reported(self, report: Report) -> None:
        """Takes a newer report; the difference of its cumulative counters measures the prefill speed."""
        self.report = report
        if report.prefill_total is not None:
            self._measure(*report.prefill_total)
        if report.waiting_uncached_tokens is None:
            self.reported_until_s = NEVER_S
        else:
            self.reported_queue_tokens = report.waiting_uncached_tokens
            self.reported_until_s = report.received_s + REPORT_FRESH_S

    def _measure(self, total_tokens: int, total_busy_us: int) -> None:
        if self._measured_from is None:
            self._measured_from = total_tokens, total_busy_us
            return
        tokens = total_tokens - self._measured_from[0]
        busy_s = (total_busy_us - self._measured_from[1]) / 1e6
        if 0 <= tokens < MIN_MEASURED_TOKENS:
            return
        self._measured_from = total_tokens, total_busy_us
        if tokens < 0 or busy_s <= 0:  # the engine restarted, or its counters are nonsense
            return
        rate = min(max(tokens / busy_s, RATE_FLOOR_TOKENS_PER_S), RATE_CAP_TOKENS_PER_S)
        old = self.prefill_tokens_per_s
        if old is not None:
            rate = min(old + (rate - old) * tokens / (tokens + RATE_MEMORY_TOKENS), RATE_MAX_STEP * old)
        self.prefill_tokens_per_s = rate

"""What this router knows of one rank's work: its own requests in flight, and what the engine reports of itself.

Pure: every method that needs the time is given it (`now_s`, any monotonic clock). A request is counted from the moment
it is placed until its last byte, exactly once, on the object that was incremented (public cases 54 and 55).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

REPORT_FRESH_S = 3.0
"""A load report older than this is not believed: SGLang sends one a second even when idle (contract, section 4)."""
RATE_FLOOR_TOKENS_PER_S = 50.0
RATE_CAP_TOKENS_PER_S = 200_000.0
"""Prefill speeds outside these bounds are nonsense. Too high a rate is catastrophic: a queue would look empty."""
MIN_MEASURED_TOKENS = 256
"""Speed is taken from at least this many prefilled tokens: shorter spans measure overhead, not prefill."""
RATE_SMOOTHING = 0.3


@dataclass(slots=True, eq=False)
class Ticket:
    """One placed request. `waiting` until its first byte came; `done` after its last."""

    load: RankLoad
    prompt_tokens: int
    uncached_tokens: int
    placed_s: float
    waiting: bool = True
    done: bool = False

    def first_byte(self) -> None:
        """The prefill is over: its tokens stop counting as queued work."""
        if self.waiting and not self.done:
            self.waiting = False
            self.load._leave_queue(self)
            self.load.decoding += 1

    def finish(self) -> None:
        """The last byte went out, or the request failed. Safe to call more than once."""
        if self.done:
            return
        if self.waiting:
            self.load._leave_queue(self)
        else:
            self.load.decoding -= 1
        self.done = True
        self.load.requests -= 1
        self.load.tokens -= self.prompt_tokens


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
    """Own in-flight work of one rank, its engine's last report, and its measured prefill speed."""

    requests: int = 0
    tokens: int = 0
    """Prompt tokens of every own request from placement to its last byte."""
    decoding: int = 0
    """Own requests past their first byte."""
    queued_uncached_tokens: int = 0
    """Uncached prompt tokens of own requests before their first byte, charged in full until then."""
    report: Report | None = None
    prefill_tokens_per_s: float | None = None
    _waiting: dict[int, Ticket] = field(default_factory=dict)
    _since_report_tokens: int = 0
    _share_tokens: float = 0.0
    _share_at_s: float = 0.0

    def place(self, prompt_tokens: int, uncached_tokens: int, now_s: float, share_tau_s: float) -> Ticket:
        """Counts a request that was just sent here."""
        ticket = Ticket(self, prompt_tokens, uncached_tokens, now_s)
        self.requests += 1
        self.tokens += prompt_tokens
        self.queued_uncached_tokens += uncached_tokens
        self._since_report_tokens += uncached_tokens
        self._share_tokens = self.share_tokens(now_s, share_tau_s) + uncached_tokens
        self._share_at_s = now_s
        self._waiting[id(ticket)] = ticket
        return ticket

    def _leave_queue(self, ticket: Ticket) -> None:
        self._waiting.pop(id(ticket), None)
        self.queued_uncached_tokens -= ticket.uncached_tokens

    def oldest_wait_s(self, now_s: float) -> float:
        """Age of the oldest own request without a first byte; 0 when there is none."""
        for ticket in self._waiting.values():  # insertion order is age order
            return max(0.0, now_s - ticket.placed_s)
        return 0.0

    def share_tokens(self, now_s: float, tau_s: float) -> float:
        """Decayed sum of the uncached tokens sent here: the long-term share (policy-study, term E)."""
        if not self._share_tokens:
            return 0.0
        return self._share_tokens * math.exp(-max(0.0, now_s - self._share_at_s) / tau_s)

    def fresh_report(self, now_s: float) -> Report | None:
        report = self.report
        return report if report is not None and now_s - report.received_s <= REPORT_FRESH_S else None

    def queue_tokens(self, now_s: float, rate_tokens_per_s: float) -> float:
        """Uncached tokens ahead of a new prompt: the largest of what we queued, what the oldest wait implies, and what
        the engine reported plus what we sent since (it sees other routers' requests, public case 57)."""
        queue = max(float(self.queued_uncached_tokens), rate_tokens_per_s * self.oldest_wait_s(now_s))
        report = self.fresh_report(now_s)
        if report is not None and report.waiting_uncached_tokens is not None:
            queue = max(queue, report.waiting_uncached_tokens + self._since_report_tokens)
        return queue

    def reported(self, report: Report) -> None:
        """Takes a newer report; the difference of its cumulative counters measures the prefill speed."""
        self._measure(self.report, report)
        self.report = report
        self._since_report_tokens = 0

    def _measure(self, before: Report | None, after: Report) -> None:
        if before is None or before.prefill_total is None or after.prefill_total is None:
            return
        tokens = after.prefill_total[0] - before.prefill_total[0]
        busy_s = (after.prefill_total[1] - before.prefill_total[1]) / 1e6
        if tokens < MIN_MEASURED_TOKENS or busy_s <= 0:
            return
        rate = min(max(tokens / busy_s, RATE_FLOOR_TOKENS_PER_S), RATE_CAP_TOKENS_PER_S)
        old = self.prefill_tokens_per_s
        self.prefill_tokens_per_s = rate if old is None else old + RATE_SMOOTHING * (rate - old)

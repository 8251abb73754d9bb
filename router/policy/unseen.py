"""Requests that were sent somewhere and whose answers pass this router by (router.envoy). Pure.

Nobody tells when their prefill or their answer ends, so the load they make is learnt from the engine: a load report
that is young enough to count them takes their place, and what runs there is what the report says runs. Until such a
report comes, and for engines that send none, a request is charged as long as the decision itself expected its first
token to take, and never longer than a limit. Nothing here can leak: every charge has an end when it is made.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from router.policy.load import REPORT_FRESH_S, RankLoad, Report, Ticket

REPORT_LAG_S = 0.25
"""A report counts the requests sent this long before it came: the way through Envoy, the engine's tokenizer and a
scheduler that takes new requests in only between two steps."""
READ_REPORTS_EVERY_S = 0.005
"""Looking through all ranks for new reports costs a decision more than reports this old."""
MAX_CHARGES = 100_000
"""At a time; beyond it the one that would end first ends now."""


@dataclass(slots=True)
class _Seen:
    """What is kept for one rank that was sent something."""

    tickets: deque[Ticket] = field(default_factory=deque)
    report: Report | None = None


class Unseen:
    """All of one router's. `settle` is to be called before every decision, and now and then when there is none."""

    def __init__(self, limit_s: float, max_charges: int = MAX_CHARGES) -> None:
        self._limit_s = limit_s
        self._max_charges = max_charges
        self._ends: list[tuple[float, int, Ticket, Callable[[], None] | None]] = []
        self._made = 0
        self._ranks: dict[RankLoad, _Seen] = {}
        self._read_s = -math.inf

    def __len__(self) -> int:
        """Charges whose end has not come, those that a report ended included."""
        return len(self._ends)

    def add(self, ticket: Ticket, expected_s: float, served: Callable[[], None] | None) -> None:
        """A request was sent, its first token expected in `expected_s` seconds. `served` is called once, when that time
        is over: by then the engine has most likely taken the prompt. Not called when the limit cuts the time short."""
        if len(self._ends) >= self._max_charges:
            _, _, oldest, _ = heapq.heappop(self._ends)
            oldest.finish()
        ticket.let_go()
        self._made += 1
        until_s = ticket.placed_s + min(expected_s, self._limit_s)
        heapq.heappush(self._ends, (until_s, self._made, ticket, served if expected_s <= self._limit_s else None))
        self._ranks.setdefault(ticket.load, _Seen()).tickets.append(ticket)

    def settle(self, now_s: float) -> None:
        """Ends what is over, and takes over what the engines reported since the last call."""
        while self._ends and self._ends[0][0] <= now_s:
            _, _, ticket, served = heapq.heappop(self._ends)
            ticket.finish()
            if served is not None:
                served()
        if not 0 <= now_s - self._read_s < READ_REPORTS_EVERY_S:
            self._read_s = now_s
            self._read_reports(now_s)

    def _read_reports(self, now_s: float) -> None:
        for load, seen in list(self._ranks.items()):
            report = load.report
            if report is not seen.report and report is not None:
                seen.report = report
                _confirm(seen.tickets, report.received_s - REPORT_LAG_S)
                load.decode_elsewhere(report.running)
            while seen.tickets and seen.tickets[0].done:
                seen.tickets.popleft()
            if report is None or now_s - report.received_s > REPORT_FRESH_S:
                load.decode_elsewhere(0)
                if not seen.tickets:
                    del self._ranks[load]


def _confirm(tickets: deque[Ticket], until_s: float) -> None:
    """The engine counts what was placed until then itself."""
    while tickets and tickets[0].placed_s <= until_s:
        tickets.popleft().finish()

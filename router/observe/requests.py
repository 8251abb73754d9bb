"""Every placed request from its decision to its end: the last of them for the live page, all of them for the access
log and traces. Pure but for the sinks it is given.

Nothing here holds a prompt: a Placed keeps the decision and numbers, never the body or its token ids (case 103).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

from router.fleet.rank import Rank
from router.policy.decide import Decision
from router.proxy.plan import RequestRecord

MAX_RECENT: Final = 64
MAX_RECENT_CANDIDATES: Final = 8192
"""A decision explains every candidate: of a large fleet fewer are kept, so that memory does not grow with it."""
MAX_NAME: Final = 200
MAX_TTFTS: Final = 4096
"""Between two samples of the curves; more than this many show nothing new."""


class Placed:
    """One request on one rank. `record` comes with its end; None of both while it runs."""

    __slots__ = (
        "at_s",
        "decision",
        "decode",
        "ids_reason",
        "ids_source",
        "model",
        "number",
        "prompt_tokens",
        "record",
        "request_id",
        "retried",
        "route",
    )

    def __init__(
        self,
        number: int,
        at_s: float,
        request_id: str,
        route: str,
        model: str | None,
        ids_source: str,
        ids_reason: str,
        prompt_tokens: int,
        decision: Decision[Rank],
        decode: Rank | None,
    ) -> None:
        self.number = number
        self.at_s = at_s
        self.request_id = request_id
        self.route = route
        self.model = model
        self.ids_source = ids_source
        self.ids_reason = ids_reason
        self.prompt_tokens = prompt_tokens
        self.decision = decision
        self.decode = decode
        """The second half of a pair."""
        self.record: RequestRecord | None = None
        self.retried = False
        """Another worker was tried afterwards: `record` is that one's."""


class Sink(Protocol):
    """Who wants to know of every finished request."""

    def finished(self, record: RequestRecord, placed: Placed | None) -> None: ...


class Requests:
    """`sinks` are told of every finished request. Costs the decision path under 1 µs."""

    def __init__(self, sinks: tuple[Sink, ...] = ()) -> None:
        self._sinks = sinks
        self._recent: deque[Placed] = deque()
        self._candidates = 0
        self._running: dict[str, Placed] = {}
        self._ttfts: list[float] = []
        self.last_number = 0
        self.finished = 0
        self.failed = 0

    @property
    def running(self) -> int:
        """Placed and not finished."""
        return len(self._running)

    def placed(
        self,
        at_s: float,
        request_id: str,
        route: str,
        model: str | None,
        ids_source: str,
        ids_reason: str,
        prompt_tokens: int,
        decision: Decision[Rank],
        decode: Rank | None = None,
    ) -> Placed:
        """`at_s`: monotonic. A second placement of the same request is its retry."""
        self.last_number += 1
        name = model if model is None or len(model) <= MAX_NAME else model[:MAX_NAME]
        one = Placed(
            self.last_number, at_s, request_id, route, name, ids_source, ids_reason, prompt_tokens, decision, decode
        )
        before = self._running.get(request_id)
        if before is not None:
            before.retried = True
        self._running[request_id] = one
        recent = self._recent
        recent.append(one)
        self._candidates += len(decision.targets)
        while len(recent) > MAX_RECENT or (self._candidates > MAX_RECENT_CANDIDATES and len(recent) > 1):
            self._candidates -= len(recent.popleft().decision.targets)
        return one

    def done(self, record: RequestRecord, *, failed: bool) -> None:
        """The request's one end. Health checks and the like were never placed."""
        one = self._running.pop(record.request_id, None)
        if one is not None:
            one.record = record
            self.finished += 1
            self.failed += failed
            if record.ttft_s is not None and len(self._ttfts) < MAX_TTFTS:
                self._ttfts.append(record.ttft_s)
        for sink in self._sinks:
            sink.finished(record, one)

    def recent(self, after: int = 0) -> Iterator[Placed]:
        """The last placements, oldest first, from number `after` + 1 on."""
        return (one for one in self._recent if one.number > after)

    def take_ttfts(self) -> list[float]:
        """Seconds to the first byte of what finished since the last call, sorted."""
        taken, self._ttfts = self._ttfts, []
        taken.sort()
        return taken

"""The live page of several processes as one. Pure: what each one's page is sent goes in, what the common page is sent
comes out.

Decisions keep the order in which they came and get numbers of their own. Points of the curves are added up in steps of
the clock, since the processes take them at different moments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from router.observe.history import FIELDS, POINTS, STEP_S
from router.observe.views import RANK_FIELDS
from router.processes.merged import worst_rank_state, worst_worker_state

Message = Mapping[str, Any]

MAX_NUMBERS = 4096
"""Decisions whose end may still come."""
MAX_KEPT_DECISIONS = 30
_SUMMED = ("running", "finished", "failed")
_RANK = {name: place for place, name in enumerate(RANK_FIELDS)}
_RANK_ADDED = [_RANK[name] for name in ("running", "requests", "prompt_tokens", "cached_tokens")]
_RANK_LEAST = [_RANK[name] for name in ("blocks_gpu", "blocks")]
_RANK_MOST = [_RANK[name] for name in ("queued_tokens", "tokens_per_s", "stored")]
_COUNTS = range(1, FIELDS.index("ttft_p50_s"))
_P50, _P95 = FIELDS.index("ttft_p50_s"), FIELDS.index("ttft_p95_s")


class LiveMerge:
    """`take` every message of every process, then `hello` for a new viewer and `tick` once a second for all."""

    def __init__(self) -> None:
        self._states: dict[int, Message] = {}
        self._first: Message = {}
        self._numbers: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._last_number = 0
        self._fresh: list[dict[str, Any]] = []
        self._kept: list[dict[str, Any]] = []
        self._ended: dict[str, Any] = {}
        self._steps: dict[int, dict[int, list[Any]]] = {}
        """By step of the clock: what each process counted in it."""
        self._shown_step = 0

    @property
    def heard(self) -> set[int]:
        """The processes whose state is known."""
        return set(self._states)

    def take(self, process: int, event: str, message: Message) -> None:
        self._states[process] = message
        if event == "hello":
            self._first = message
            for key in [key for key in self._numbers if key[0] == process]:
                del self._numbers[key]  # it may be another one, that counts from 1 again
        for point in message["points"] if event == "hello" else [message["point"]] * (message["point"] is not None):
            self._add_point(process, point)
        for decision in message["decisions"]:
            self._add_decision(process, decision)
        for number, end in message.get("ended", {}).items():
            own = self._numbers.get((process, int(number)))
            if own is not None:
                self._ended[str(own)] = end

    def lost(self, process: int) -> None:
        """It is not heard any more: its state is nobody's."""
        self._states.pop(process, None)

    def _add_decision(self, process: int, decision: Message) -> None:
        key = process, decision["number"]
        if key in self._numbers:
            return
        self._last_number += 1
        self._numbers[key] = self._last_number
        if len(self._numbers) > MAX_NUMBERS:
            self._numbers.popitem(last=False)
        one = {**decision, "number": self._last_number, "process": process}
        self._fresh = [*self._fresh, one][-MAX_KEPT_DECISIONS:]
        self._kept = [*self._kept, one][-MAX_KEPT_DECISIONS:]

    def _add_point(self, process: int, point: list[Any]) -> None:
        step = round(point[0] / STEP_S)
        by_process = self._steps.setdefault(step, {})
        before = by_process.get(process)
        if before is None or before[0] == point[0]:
            by_process[process] = point
        else:
            by_process[process] = _sum_of([before, point], point[0])
        while len(self._steps) > POINTS:
            del self._steps[min(self._steps)]

    def hello(self) -> dict[str, Any]:
        points = [_sum_of(list(self._steps[step].values()), step * STEP_S) for step in sorted(self._steps)]
        self._shown_step = max(self._steps, default=self._shown_step)
        return {**self._first, **self._state(), "points": points, "decisions": list(self._kept)}

    def tick(self) -> dict[str, Any]:
        fresh, self._fresh = self._fresh, []
        ended, self._ended = self._ended, {}
        return {**self._state(), "point": self._next_point(), "decisions": fresh, "ended": ended}

    def _next_point(self) -> list[Any] | None:
        """Of the newest step that is over for all of them."""
        over = max(self._steps, default=0) - 1
        if over <= self._shown_step or over not in self._steps:
            return None
        self._shown_step = over
        return _sum_of(list(self._steps[over].values()), over * STEP_S)

    def _state(self) -> dict[str, Any]:
        states = list(self._states.values())
        workers: dict[str, list[Message]] = {}
        for state in states:
            for worker in state["workers"]:
                workers.setdefault(worker["url"], []).append(worker)
        return {
            "at": max((state["at"] for state in states), default=0.0),
            **{name: sum(state[name] for state in states) for name in _SUMMED},
            "workers": [_worker(several) for several in workers.values()],
        }


def _worker(several: Sequence[Message]) -> dict[str, Any]:
    worst = worst_worker_state(several)
    drift = {one["kind"]: one for worker in several for one in worker.get("drift", ())}
    ranks: dict[int, list[list[Any]]] = {}
    for worker in several:
        for rank in worker["ranks"]:
            ranks.setdefault(rank[0], []).append(rank)
    merged = {**several[0], "state": worst["state"], "reason": worst["reason"]}
    merged["ranks"] = [_rank(ranks[number]) for number in sorted(ranks)]
    return {**merged, "drift": list(drift.values())} if drift else merged


def _rank(several: Sequence[list[Any]]) -> list[Any]:
    state, reason = _RANK["state"], _RANK["reason"]
    merged = list(several[0])
    worst = worst_rank_state([{"state": rank[state], "reason": rank[reason]} for rank in several])
    merged[state], merged[reason] = worst["state"], worst["reason"]
    for places, rule in ((_RANK_ADDED, sum), (_RANK_LEAST, min), (_RANK_MOST, max)):
        for place in places:
            known = [rank[place] for rank in several if rank[place] is not None]
            merged[place] = rule(known) if known else None
    return merged


def _sum_of(points: Sequence[list[Any]], at_s: float) -> list[Any]:
    """Counts added up; the median is the processes' mean by requests, the 95th percentile the highest of theirs."""
    total: list[Any] = [round(at_s, 3), *(sum(point[place] for point in points) for place in _COUNTS), None, None]
    timed = [point for point in points if point[_P50] is not None]
    if timed:
        weights = [max(1, point[1]) for point in timed]
        weighted = sum(point[_P50] * weight for point, weight in zip(timed, weights, strict=True))
        total[_P50] = round(weighted / sum(weights), 5)
        total[_P95] = max(point[_P95] for point in timed)
    return total

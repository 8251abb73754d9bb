"""`GET /workers` of several processes as one. Pure.

Every process follows every engine, so for what they should agree on (blocks, last_seq, states) the view is the least
that every one of them has; what each does for itself (requests, tokens in flight) is added up; faults of a stream that
all of them read are counted once, as by the one who saw most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

View = Mapping[str, Any]

_WORKER_STATES = ("ready", "starting", "draining", "unhealthy")
_RANK_STATES = ("live", "replaying", "gapped", "connecting", "silent", "drifted", "duplicated", "unreachable", "off")
"""Best first: the merged state is the worst of them."""


def _sum(values: Sequence[Any]) -> Any:
    return sum(values)


_WORKER_RULES: dict[str, Callable[[Sequence[Any]], Any]] = {"incarnation": max}
_RANK_RULES: dict[str, Callable[[Sequence[Any]], Any]] = {
    "inflight_requests": _sum,
    "inflight_tokens": _sum,
    "last_seq": min,
    "last_event_age_s": max,
    "load_report_age_s": max,
    "gaps": max,
    "restarts": max,
    "batches_lost": max,
    "trusted": all,
    "degraded": any,
    "credit_share": min,
}


def merge_workers(views: Sequence[tuple[int, View]]) -> list[dict[str, Any]]:
    """`views`: (process number, its answer). A worker that only some have is shown as they have it."""
    by_url: dict[str, list[tuple[int, View]]] = {}
    for number, view in views:
        for worker in view["workers"]:
            by_url.setdefault(worker["url"], []).append((number, worker))
    return [_worker(several, of=len(views)) for several in by_url.values()]


def _worker(several: Sequence[tuple[int, View]], of: int) -> dict[str, Any]:
    merged = _ruled(several, _WORKER_RULES)
    _worst(merged, several, _WORKER_STATES)
    if len(several) < of:
        merged["reason"] = f"only in process {', '.join(str(number) for number, _ in several)}. {merged['reason']}"
    drift: dict[str, Any] = {}
    for _, worker in several:
        for one in worker["drift"]:
            drift.setdefault(one["kind"], one)
    merged["drift"] = list(drift.values())
    ranks: dict[int, list[tuple[int, View]]] = {}
    for number, worker in several:
        for rank in worker["ranks"]:
            ranks.setdefault(rank["rank"], []).append((number, rank))
    merged["ranks"] = [_rank(ranks[number]) for number in sorted(ranks)]
    return merged


def _rank(several: Sequence[tuple[int, View]]) -> dict[str, Any]:
    merged = _ruled(several, _RANK_RULES)
    _worst(merged, several, _RANK_STATES)
    media = {medium for _, rank in several for medium in rank["blocks"]}
    merged["blocks"] = {m: min(rank["blocks"].get(m, 0) for _, rank in several) for m in sorted(media)}
    merged["history"] = "complete" if all(rank["history"] == "complete" for _, rank in several) else "partial"
    merged["replays"] = _added(rank["replays"] for _, rank in several)
    return merged


def _ruled(several: Sequence[tuple[int, View]], rules: Mapping[str, Callable[[Sequence[Any]], Any]]) -> dict[str, Any]:
    """The first process's, with `rules` applied to the keys that have one; what nobody knows stays None."""
    merged = dict(several[0][1])
    for key, rule in rules.items():
        known = [view[key] for _, view in several if view.get(key) is not None]
        if known:
            merged[key] = rule(known)
    return merged


def _worst(merged: dict[str, Any], several: Sequence[tuple[int, View]], states: Sequence[str]) -> None:
    """State and reason of the process that is worst off; says which one, where they differ."""
    number, worst = max(several, key=lambda one: _badness(one[1], states))
    merged["state"], merged["reason"] = worst["state"], worst["reason"]
    if len({view["state"] for _, view in several}) > 1:
        merged["reason"] = f"process {number}: {worst['reason']}"


def worst_worker_state(views: Sequence[View]) -> View:
    """The one whose state is worst."""
    return max(views, key=lambda view: _badness(view, _WORKER_STATES))


def worst_rank_state(views: Sequence[View]) -> View:
    """The one whose state is worst."""
    return max(views, key=lambda view: _badness(view, _RANK_STATES))


def _badness(view: View, states: Sequence[str]) -> int:
    return states.index(view["state"]) if view["state"] in states else len(states)


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for each in counts:
        for name, count in each.items():
            total[name] = total.get(name, 0) + count
    return total

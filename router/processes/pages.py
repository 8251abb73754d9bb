"""The metrics pages of several processes as one. Pure.

Counters and histograms are added up, but for those of the event streams, which every process reads whole: these are
counted once, as by the process that saw most. What an ended process had counted stays in the sums, so that no counter
goes back when one is restarted; the series of a worker still end with the worker (case 98). Gauges go by `GAUGES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

SEEN_BY_ALL = frozenset(
    {
        "kv_router_events",
        "kv_router_event_batches_lost",
        "kv_router_event_messages_rejected",
        "kv_router_event_gaps",
        "kv_router_stream_restarts",
        "kv_router_discovery_failures",
    }
)
"""Counters (without _total) of what all processes see alike."""
GAUGES: dict[str, Callable[[Iterable[float]], float]] = {
    "kv_router_build_info": max,
    "kv_router_worker_up": min,
    "kv_router_worker_breaker_open": max,
    "kv_router_contract_drift": max,
    "kv_router_stream_state": max,
    "kv_router_index_blocks": min,
    "kv_router_index_capacity_blocks": max,
    "kv_router_worker_inflight_requests": sum,
    "kv_router_worker_inflight_tokens": sum,
    "kv_router_ready_workers": min,
    "kv_router_ready_role_workers": min,
    "kv_router_worker_role": max,
    "kv_router_prefill_legs": sum,
    "kv_router_rank_queued_tokens": max,
    "kv_router_rank_prefill_tokens_per_second": max,
    "kv_router_waiting_requests": sum,
    "kv_router_buffered_body_bytes": sum,
    "kv_router_prompt_cache_bytes": sum,
    "kv_router_siblings": min,
    "kv_router_discovery_synced_timestamp_seconds": min,
    "kv_router_discovery_workers": min,
}
"""min: what every process has. max: what any has, or measured. sum: each has its own."""
_LIVE = 'state="live"'


@dataclass(slots=True)
class Family:
    """One metric of a page: its comment lines, and samples by name with labels."""

    name: str
    kind: str
    head: list[str]
    samples: dict[str, float] = field(default_factory=dict)


Page = dict[str, Family]


def parse(text: str) -> Page:
    """A page as prometheus_client writes it: HELP and TYPE before the samples of each family."""
    page: Page = {}
    family = Family("", "", [])
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            family = page[name] = Family(name, "", [line])
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ", 3)
            if name != family.name:
                family = page[name] = Family(name, kind, [])
            family.kind = kind
            family.head.append(line)
        elif line and not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            family.samples[sample] = float(value)
    return page


class Pages:
    """Keeps what has been shown, and what ended processes had counted when last asked."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], Page] = {}
        """By (process, restarts): the newest page of each that was ever asked."""
        self._ended: dict[str, float] = {}
        """What processes had counted that have been replaced."""
        self._shown: dict[str, float] = {}
        """Counters that all see alike, as they were last shown."""

    def render(self, pages: Mapping[tuple[int, int], str], own: str = "") -> bytes:
        """`pages` of the processes that answered, by (number, restarts); `own` goes behind them."""
        live = {who: parse(text) for who, text in pages.items()}
        self._retire(live.keys())
        self._last.update(live)
        gone = dict(self._ended)
        for who, page in self._last.items():
            if who not in live:  # it is down, or did not answer this time
                _add_counts(gone, page)
        lines: list[str] = []
        shown: dict[str, float] = {}
        for family in _families(self._last.values()):
            several = [page[family.name].samples for page in live.values() if family.name in page]
            if _is_added(family):
                family.samples = _added(several, gone, family.name)
            else:
                family.samples = _agreed(family, several)
            if family.kind == "counter" and _base(family.name) in SEEN_BY_ALL:
                for sample, value in family.samples.items():
                    shown[sample] = family.samples[sample] = max(value, self._shown.get(sample, 0.0))
            lines += family.head
            lines += [f"{name} {value!r}" for name, value in family.samples.items()]
        self._shown = shown
        if live:
            kept = {name for page in live.values() for family in page.values() for name in family.samples}
            self._ended = {name: v for name, v in self._ended.items() if not _of_worker(name) or name in kept}
        return ("\n".join(lines) + "\n" + own).encode()

    def _retire(self, live: Iterable[tuple[int, int]]) -> None:
        """Those that have been replaced will not answer again."""
        newest = dict(sorted(live))
        for number, restarts in list(self._last):
            if newest.get(number, 0) > restarts:
                _add_counts(self._ended, self._last.pop((number, restarts)))


def _families(pages: Iterable[Page]) -> list[Family]:
    """Every family once, without samples. A merged counter has no one time of creation."""
    found: dict[str, Family] = {}
    for page in pages:
        for name, family in page.items():
            if not name.endswith("_created"):
                found.setdefault(name, Family(name, family.kind, family.head))
    return list(found.values())


def _add_counts(totals: dict[str, float], page: Page) -> None:
    for family in page.values():
        if _is_added(family):
            for sample, value in family.samples.items():
                totals[sample] = totals.get(sample, 0.0) + value


def _added(several: list[dict[str, float]], gone: Mapping[str, float], family: str) -> dict[str, float]:
    names = dict.fromkeys(name for samples in several for name in samples)
    names.update(dict.fromkeys(name for name in gone if _family_of(name) == family and not _of_worker(name)))
    return {name: sum(samples.get(name, 0.0) for samples in several) + gone.get(name, 0.0) for name in names}


def _agreed(family: Family, several: list[dict[str, float]]) -> dict[str, float]:
    rule: Callable[[Iterable[float]], float] = max if family.kind == "counter" else GAUGES.get(family.name, sum)
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for samples in several for name in samples):
        held = [samples[name] for samples in several if name in samples]
        # A rank is live where every process follows it; any other state shows when one process is in it.
        found[name] = min(held) if family.name == "kv_router_stream_state" and _LIVE in name else rule(held)
    return found


def _base(name: str) -> str:
    return name.removesuffix("_total")


def _is_added(family: Family) -> bool:
    return family.kind == "histogram" or (family.kind == "counter" and _base(family.name) not in SEEN_BY_ALL)


def _of_worker(sample: str) -> bool:
    return 'worker="' in sample


def _family_of(sample: str) -> str:
    name = sample.partition("{")[0]
    for suffix in ("_bucket", "_sum", "_count"):
        name = name.removesuffix(suffix)
    return name

"""Every metric of the router, named in this one place.

Two kinds. Counters and histograms on the request path are prometheus_client objects whose children are kept (a cached
child costs 0.3 µs, `.labels()` 1.4). Gauges per worker or rank are read from the fleet when a scrape comes; what the
event streams count comes through FleetObserver. The series of a removed worker end with it (public case 98). Labels
come from closed sets (routes, outcomes, reasons) or from the fleet, never from a client (cases 96 and 97).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60)
DECISION_BUCKETS = (2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)


class Children:
    """A labelled counter's children, kept by their label values. Only for label values from closed sets."""

    def __init__(self, metric: Counter) -> None:
        self._metric = metric
        self._children: dict[tuple[str, ...], Counter] = {}

    def inc(self, *values: str, by: float = 1) -> None:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*values)
        child.inc(by)

    def remove(self, *leading: str) -> None:
        """Ends every series whose label values begin with `leading`."""
        for values in [v for v in self._children if v[: len(leading)] == leading]:
            del self._children[values]
            self._metric.remove(*values)


class HistogramChildren:
    """As Children, for histograms."""

    def __init__(self, metric: Histogram) -> None:
        self._metric = metric
        self._children: dict[tuple[str, ...], Histogram] = {}

    def observe(self, seconds: float, *values: str) -> None:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = self._metric.labels(*values)
        child.observe(seconds)


@dataclass(slots=True)
class RankSample:
    """One rank at scrape time."""

    rank: int
    state: str
    blocks: dict[str, int]
    inflight_requests: int
    inflight_tokens: int


@dataclass(slots=True)
class WorkerSample:
    """One worker at scrape time."""

    worker: str
    up: bool
    drift: Sequence[str]
    ranks: Sequence[RankSample]


class _FleetCollector(Collector):
    """The per-worker families, made from one snapshot; used once."""

    def __init__(self, workers: Sequence[WorkerSample], rank_states: Iterable[str], drift_kinds: Iterable[str]) -> None:
        self._workers = workers
        self._rank_states = tuple(rank_states)
        self._drift_kinds = tuple(drift_kinds)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        worker = ["worker"]
        rank = ["worker", "rank"]
        up = GaugeMetricFamily("kv_router_worker_up", "1 while requests may be sent to the worker", labels=worker)
        drift = GaugeMetricFamily(
            "kv_router_contract_drift", "1 while router and engine disagree on this", labels=[*worker, "kind"]
        )
        state = GaugeMetricFamily("kv_router_stream_state", "1 for the rank's current state", labels=[*rank, "state"])
        blocks = GaugeMetricFamily("kv_router_index_blocks", "resident blocks", labels=[*rank, "medium"])
        requests = GaugeMetricFamily("kv_router_worker_inflight_requests", "own requests in flight", labels=rank)
        tokens = GaugeMetricFamily("kv_router_worker_inflight_tokens", "prompt tokens in flight", labels=rank)
        for w in self._workers:
            up.add_metric([w.worker], 1 if w.up else 0)
            for kind in self._drift_kinds:
                drift.add_metric([w.worker, kind], 1 if kind in w.drift else 0)
            for r in w.ranks:
                at = [w.worker, str(r.rank)]
                for name in self._rank_states:
                    state.add_metric([*at, name], 1 if name == r.state else 0)
                for medium, count in r.blocks.items():
                    blocks.add_metric([*at, medium], count)
                requests.add_metric(at, r.inflight_requests)
                tokens.add_metric(at, r.inflight_tokens)
        yield from (up, drift, state, blocks, requests, tokens)


class Metrics:
    """Every counter and histogram of the process, and the fleet's observer (router.fleet.observer.FleetObserver).

    Names are promises of interface.md.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        at = self.registry
        self.requests = Children(Counter("kv_router_requests", "finished requests", ["route", "outcome"], registry=at))
        self.request_seconds = HistogramChildren(
            Histogram("kv_router_request_seconds", "head to last byte", ["route"], registry=at, buckets=SECONDS_BUCKETS)
        )
        self.ttft_seconds = HistogramChildren(
            Histogram("kv_router_ttft_seconds", "head to first body byte", ["route"], registry=at, buckets=TTFT_BUCKETS)
        )
        self.decision_seconds = Histogram(
            "kv_router_decision_seconds", "matching and choosing", registry=at, buckets=DECISION_BUCKETS
        )
        self.decisions = Children(Counter("kv_router_decisions", "placements by reason", ["reason"], registry=at))
        self.prompts = Children(
            Counter("kv_router_prompts", "where a prompt's token ids came from", ["source", "reason"], registry=at)
        )
        self.prompt_tokens = Counter("kv_router_prompt_tokens", "prompt tokens placed", registry=at)
        self.predicted_cached_tokens = Counter(
            "kv_router_predicted_cached_tokens", "tokens the chosen rank was believed to hold", registry=at
        )
        self.best_cached_tokens = Counter(
            "kv_router_best_cached_tokens", "the most any rank was believed to hold", registry=at
        )
        self.reported_prompt_tokens = Counter(
            "kv_router_reported_prompt_tokens", "prompt tokens as engines reported them", registry=at
        )
        self.reported_cached_tokens = Counter(
            "kv_router_reported_cached_tokens", "cached tokens as engines reported them", registry=at
        )
        self.prediction_error_tokens = Children(
            Counter(
                "kv_router_prediction_error_tokens", "predicted minus reported, by sign", ["direction"], registry=at
            )
        )
        self.event_lag_seconds = Histogram(
            "kv_router_event_lag_seconds", "from the engine's timestamp to applied", registry=at, buckets=LAG_BUCKETS
        )

        rank = ["worker", "rank"]
        self._events = Children(Counter("kv_router_events", "KV events by type", [*rank, "type"], registry=at))
        self._batches_lost = Children(
            Counter("kv_router_event_batches_lost", "batches neither stream nor replay delivered", rank, registry=at)
        )
        self._rejected = Children(
            Counter("kv_router_event_messages_rejected", "unusable stream messages", [*rank, "kind"], registry=at)
        )
        self._gaps = Counter("kv_router_event_gaps", "holes in a rank's sequence", registry=at)
        self._restarts = Counter("kv_router_stream_restarts", "publishers that started again", registry=at)
        self._replays = Children(Counter("kv_router_replays", "replays by outcome", ["outcome"], registry=at))

    def worker_state(self, worker: str, state: str) -> None:
        """Read at scrape time."""

    def rank_state(self, worker: str, rank: int, state: str) -> None:
        """Read at scrape time."""

    def drift(self, worker: str, kind: str, active: bool) -> None:
        """Read at scrape time."""

    def worker_removed(self, worker: str) -> None:
        for family in (self._events, self._batches_lost, self._rejected):
            family.remove(worker)

    def rank_removed(self, worker: str, rank: int) -> None:
        for family in (self._events, self._batches_lost, self._rejected):
            family.remove(worker, str(rank))

    def events(self, worker: str, rank: int, kind: str, count: int) -> None:
        self._events.inc(worker, str(rank), kind, by=count)

    def event_lag(self, lag_s: float) -> None:
        self.event_lag_seconds.observe(lag_s)

    def batches_lost(self, worker: str, rank: int, batches: int) -> None:
        self._batches_lost.inc(worker, str(rank), by=batches)

    def gap(self, worker: str, rank: int) -> None:
        self._gaps.inc()

    def restart(self, worker: str, rank: int) -> None:
        self._restarts.inc()

    def replay(self, worker: str, rank: int, outcome: str) -> None:
        self._replays.inc(outcome)

    def rejected(self, worker: str, rank: int, kind: str) -> None:
        self._rejected.inc(worker, str(rank), kind)

    def render(self, workers: Sequence[WorkerSample], rank_states: Iterable[str], drift_kinds: Iterable[str]) -> bytes:
        """The Prometheus text page. Safe to call from a thread: `workers` is a snapshot."""
        page = CollectorRegistry(auto_describe=False)
        page.register(_FleetCollector(workers, rank_states, drift_kinds))
        return generate_latest(self.registry) + generate_latest(page)

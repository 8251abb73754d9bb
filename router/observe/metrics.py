"""Every metric of the router, named in this one place.

Two kinds. Counters and histograms are router.observe.counters', cheap enough for the request path. Gauges per worker or
rank are read from the fleet when a scrape comes; what the event streams count comes through FleetObserver. The series
of a removed worker end with it (public case 98). Labels come from closed sets (routes, outcomes, reasons) or from the
fleet, never from a client (cases 96 and 97).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router import __version__
from router.observe.counters import Children, Counter, HistogramChildren, TallyCounter
from router.observe.tally import Tally

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TTFT_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60)
DECISION_BUCKETS = (2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 0.1, 0.5)
ROLES = ("plain", "prefill", "decode")
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)


@dataclass(slots=True)
class RankSample:
    """One rank at scrape time."""

    rank: int
    state: str
    blocks: dict[str, int]
    inflight_requests: int
    inflight_tokens: int
    queued_tokens: float
    prefill_tokens_per_s: float | None
    tally: Tally
    """A copy: the page is made in a thread."""


@dataclass(slots=True)
class WorkerSample:
    """One worker at scrape time."""

    worker: str
    up: bool
    drift: Sequence[str]
    capacity_blocks: int | None
    breaker_open: bool
    role: str
    ranks: Sequence[RankSample]


_RANK_COUNTERS = (
    ("requests", "answered requests"),
    ("prompt_tokens", "prompt tokens of answered requests"),
    ("predicted_cached_tokens", "of them, tokens the rank was believed to hold"),
    ("reported_prompt_tokens", "prompt tokens where the engine reported cached ones"),
    ("reported_cached_tokens", "cached tokens the engine reported"),
)
"""Fields of Tally. They begin at 0 with every incarnation of the worker."""


_TOTALS = (
    ("prompt_tokens", "prompt tokens placed"),
    ("predicted_cached_tokens", "tokens the chosen rank was believed to hold"),
    ("best_cached_tokens", "the most any rank was believed to hold"),
    ("blind_cached_tokens", "the candidates' mean: what a choice without knowledge finds"),
)
"""Fields of Tally, of all ranks that ever were."""


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
        breaker = GaugeMetricFamily(
            "kv_router_worker_breaker_open", "1 while the worker is passed over for answering 5xx", labels=worker
        )
        drift = GaugeMetricFamily(
            "kv_router_contract_drift", "1 while router and engine disagree on this", labels=[*worker, "kind"]
        )
        state = GaugeMetricFamily("kv_router_stream_state", "1 for the rank's current state", labels=[*rank, "state"])
        blocks = GaugeMetricFamily("kv_router_index_blocks", "resident blocks", labels=[*rank, "medium"])
        requests = GaugeMetricFamily("kv_router_worker_inflight_requests", "own requests in flight", labels=rank)
        tokens = GaugeMetricFamily("kv_router_worker_inflight_tokens", "prompt tokens in flight", labels=rank)
        capacity = GaugeMetricFamily(
            "kv_router_index_capacity_blocks", "KV blocks one rank of the worker has on its GPU", labels=worker
        )
        ready = GaugeMetricFamily("kv_router_ready_workers", "workers that requests may be sent to")
        roles = GaugeMetricFamily(
            "kv_router_worker_role", "1 for what the worker's engine serves", labels=[*worker, "role"]
        )
        pool = GaugeMetricFamily("kv_router_ready_role_workers", "workers of a role that are ready", labels=["role"])
        queued = GaugeMetricFamily(
            "kv_router_rank_queued_tokens", "uncached prompt tokens before their first byte", labels=rank
        )
        speed = GaugeMetricFamily(
            "kv_router_rank_prefill_tokens_per_second", "prefill speed measured from load reports", labels=rank
        )
        counted = [CounterMetricFamily(f"kv_router_rank_{name}", text, labels=rank) for name, text in _RANK_COUNTERS]
        ready.add_metric([], sum(w.up for w in self._workers))
        for role in ROLES:
            pool.add_metric([role], sum(w.up and w.role == role for w in self._workers))
        for w in self._workers:
            up.add_metric([w.worker], 1 if w.up else 0)
            if w.capacity_blocks is not None:
                capacity.add_metric([w.worker], w.capacity_blocks)
            breaker.add_metric([w.worker], 1 if w.breaker_open else 0)
            roles.add_metric([w.worker, w.role], 1)
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
                queued.add_metric(at, r.queued_tokens)
                if r.prefill_tokens_per_s is not None:
                    speed.add_metric(at, r.prefill_tokens_per_s)
                for family, (name, _) in zip(counted, _RANK_COUNTERS, strict=True):
                    family.add_metric(at, getattr(r.tally, name))
        yield from (
            up,
            ready,
            roles,
            pool,
            breaker,
            drift,
            state,
            blocks,
            capacity,
            requests,
            tokens,
            queued,
            speed,
            *counted,
        )


class Metrics:
    """Every counter and histogram of the process, and the fleet's observer (router.fleet.observer.FleetObserver).

    Names are promises of interface.md.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        at = self.registry
        self.requests = Children("kv_router_requests", "finished requests", ["route", "outcome"], registry=at)
        self.request_seconds = HistogramChildren(
            "kv_router_request_seconds", "head to last byte", ["route"], registry=at, buckets=SECONDS_BUCKETS
        )
        self.ttft_seconds = HistogramChildren(
            "kv_router_ttft_seconds", "head to first body byte", ["route"], registry=at, buckets=TTFT_BUCKETS
        )
        self.decision_seconds = HistogramChildren(
            "kv_router_decision_seconds", "matching and choosing", (), registry=at, buckets=DECISION_BUCKETS
        )
        self.decisions = Children("kv_router_decisions", "placements by reason", ["reason"], registry=at)
        self.prompts = Children(
            "kv_router_prompts", "where a prompt's token ids came from", ["source", "reason"], registry=at
        )
        self.pairs = Children("kv_router_pairs", "prefill/decode pairs by how they ended", ["outcome"], registry=at)
        self.prefill_legs = Gauge(
            "kv_router_prefill_legs", "requests on prefill engines, of clients that left too", registry=at
        )
        self.pair_prefill_seconds = HistogramChildren(
            "kv_router_pair_prefill_seconds",
            "placement to the prefill engine's answer",
            (),
            registry=at,
            buckets=TTFT_BUCKETS,
        )
        self.pair_handover_seconds = HistogramChildren(
            "kv_router_pair_handover_seconds",
            "prefill engine's answer to the decode engine's first byte",
            (),
            registry=at,
            buckets=TTFT_BUCKETS,
        )
        self.waiting_requests = Gauge("kv_router_waiting_requests", "requests that wait for room", registry=at)
        self.queue_wait_seconds = HistogramChildren(
            "kv_router_queue_wait_seconds", "wait for room on a worker", (), registry=at, buckets=TTFT_BUCKETS
        )
        self.buffered_body_bytes = Gauge("kv_router_buffered_body_bytes", "request bodies held", registry=at)
        self.prompt_checks = Children(
            "kv_router_prompt_checks", "prompts made twice and compared", ["outcome"], registry=at
        )
        self.forwarded_prompts = Counter("kv_router_forwarded_prompts", "chats sent with their ids", registry=at)
        self.uncredited_prompts = Counter(
            "kv_router_uncredited_prompts", "prompts whose cache namespace cannot be told from the stream", registry=at
        )
        self.prompt_cache_tokens = Children(
            "kv_router_prompt_cache_tokens", "tokens kept from earlier turns, or made", ["result"], registry=at
        )
        self.prompt_cache_bytes = Gauge("kv_router_prompt_cache_bytes", "kept of earlier turns", registry=at)
        self.reported_prompt_tokens = Counter(
            "kv_router_reported_prompt_tokens", "prompt tokens as engines reported them", registry=at
        )
        self.reported_cached_tokens = Counter(
            "kv_router_reported_cached_tokens", "cached tokens as engines reported them", registry=at
        )
        self.prediction_error_tokens = Children(
            "kv_router_prediction_error_tokens", "predicted minus reported, by sign", ["direction"], registry=at
        )
        self.access_lines_dropped = Counter(
            "kv_router_access_lines_dropped", "access log lines nobody read in time", registry=at
        )
        self.siblings = Gauge("kv_router_siblings", "other routers heard lately", registry=at)
        self.sibling_frames = Children(
            "kv_router_sibling_frames", "load messages between routers", ["outcome"], registry=at
        )
        self.snapshots = Children(
            "kv_router_snapshots", "a rank's blocks told to a sibling, or learnt", ["outcome"], registry=at
        )
        self.event_lag_seconds = HistogramChildren(
            "kv_router_event_lag_seconds",
            "from the engine's timestamp to applied",
            (),
            registry=at,
            buckets=LAG_BUCKETS,
        )

        self.totals = Tally()
        """Also where the live page reads the tokens of requests."""
        for name, text in _TOTALS:
            TallyCounter(f"kv_router_{name}", text, self.totals, name, registry=at)
        info = Gauge("kv_router_build_info", "1; the version is in the label", ["version"], registry=at)
        info.labels(__version__).set(1)

        rank = ["worker", "rank"]
        self._events = Children("kv_router_events", "KV events by type", [*rank, "type"], registry=at)
        self._batches_lost = Children(
            "kv_router_event_batches_lost", "batches neither stream nor replay delivered", rank, registry=at
        )
        self._rejected = Children(
            "kv_router_event_messages_rejected", "unusable stream messages", [*rank, "kind"], registry=at
        )
        self._gaps = Counter("kv_router_event_gaps", "holes in a rank's sequence", registry=at)
        self._restarts = Counter("kv_router_stream_restarts", "publishers that started again", registry=at)
        source = ["source"]
        self._discovery_failures = Children(
            "kv_router_discovery_failures", "times a source could not be read", source, registry=at
        )
        self._discovery_synced = Gauge(
            "kv_router_discovery_synced_timestamp_seconds", "when the source was last in step", source, registry=at
        )
        self._discovery_workers = Gauge(
            "kv_router_discovery_workers", "workers in the fleet by discovery", source, registry=at
        )
        self._replays = Children("kv_router_replays", "replays by outcome", ["outcome"], registry=at)

    def worker_state(self, worker: str, state: str) -> None:
        """Read at scrape time."""

    def rank_state(self, worker: str, rank: int, state: str) -> None:
        """The state is read at scrape time. What alerts take rates of begins at 0, or the first is missed."""
        self._batches_lost.inc(worker, str(rank), by=0)
        self._events.inc(worker, str(rank), "stored", by=0)

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

    def discovery_synced(self, source: str, workers: int) -> None:
        self._discovery_synced.labels(source).set_to_current_time()
        self._discovery_workers.labels(source).set(workers)

    def discovery_failed(self, source: str) -> None:
        self._discovery_failures.inc(source)

    def render(self, workers: Sequence[WorkerSample], rank_states: Iterable[str], drift_kinds: Iterable[str]) -> bytes:
        """The Prometheus text page. Safe to call from a thread: `workers` is a snapshot."""
        page = CollectorRegistry(auto_describe=False)
        page.register(_FleetCollector(workers, rank_states, drift_kinds))
        return generate_latest(self.registry) + generate_latest(page)

"""The metrics page: per-rank counters, zeros where alerts take rates, and no series of what is gone."""

from __future__ import annotations

from router.observe.metrics import Metrics, RankSample, WorkerSample
from router.observe.tally import Tally


def worker(name: str = "http://a:1", *, up: bool = True, **tally: int) -> WorkerSample:
    rank = RankSample(0, "live", {"GPU": 7}, 2, 300, 120.0, 8000.0, Tally(**tally))
    return WorkerSample(name, up, ("hash",), 31, False, "plain", [rank])


def page(metrics: Metrics, *workers: WorkerSample) -> list[str]:
    return metrics.render(workers, ("live", "gapped"), ("hash", "block_size")).decode().splitlines()


def test_a_ranks_tally_is_counters_and_its_queue_can_be_turned_into_seconds() -> None:
    lines = page(
        Metrics(), worker(prompt_tokens=100, predicted_cached_tokens=60, reported_cached_tokens=50, requests=3)
    )
    at = '{rank="0",worker="http://a:1"}'
    shown = {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if not line.startswith("#")}
    assert shown[f"kv_router_rank_prompt_tokens_total{at}"] == 100
    assert shown[f"kv_router_rank_predicted_cached_tokens_total{at}"] == 60
    assert shown[f"kv_router_rank_reported_cached_tokens_total{at}"] == 50
    assert shown[f"kv_router_rank_requests_total{at}"] == 3
    assert shown[f"kv_router_rank_queued_tokens{at}"] == 120
    assert shown[f"kv_router_rank_prefill_tokens_per_second{at}"] == 8000
    assert shown['kv_router_index_capacity_blocks{worker="http://a:1"}'] == 31
    assert shown["kv_router_ready_workers"] == 1


def test_no_worker_at_all_is_a_zero_not_an_absence() -> None:
    """An alert on `kv_router_ready_workers == 0` must see it."""
    assert "kv_router_ready_workers 0.0" in page(Metrics())
    assert "kv_router_ready_workers 0.0" in page(Metrics(), worker(up=False))


def test_a_ranks_losses_begin_at_zero_and_end_with_the_worker() -> None:
    """A rate over a series that is born at 12 misses the twelve. Case 98."""
    metrics = Metrics()
    metrics.rank_state("http://a:1", 0, "connecting")
    (lost,) = [line for line in page(metrics) if line.startswith("kv_router_event_batches_lost_total{")]
    assert lost.endswith(" 0.0")
    metrics.batches_lost("http://a:1", 0, 12)
    metrics.rank_state("http://a:1", 0, "gapped")
    assert any(line.endswith(" 12.0") for line in page(metrics) if "batches_lost_total{" in line)
    metrics.worker_removed("http://a:1")
    assert not [line for line in page(metrics) if "http://a:1" in line]

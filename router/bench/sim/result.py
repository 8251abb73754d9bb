"""What a run of the simulation showed: one row per policy, medians over seeds and how far the seeds lie apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from router.bench.sim.world import World

GOOD_TTFT_S = 2.0
GOOD_TPOT_S = 0.05


def quantile(values: Sequence[float], share: float) -> float:
    """Nearest rank, of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]


def measure(world: World, *, second_half: bool) -> dict[str, Any]:
    """One run's numbers, over all requests or over the second half, which the first has warmed."""
    jobs = world.jobs[len(world.jobs) // 2 :] if second_half else world.jobs
    ttft: list[float] = []
    tpot: list[float] = []
    good = 0
    computed: Counter[int] = Counter()
    for job in jobs:
        assert job.first_token_s is not None
        assert job.finished_s is not None
        first_s = job.first_token_s - job.submitted_s
        per_token_s = (job.finished_s - job.first_token_s) / max(1, job.request.output_tokens - 1)
        ttft.append(first_s)
        if job.request.output_tokens > 1:
            tpot.append(per_token_s)
        good += first_s < GOOD_TTFT_S and per_token_s < GOOD_TPOT_S
        computed[world.placed[job.number]] += job.request.prompt_tokens - job.cached_tokens
    ttft.sort()
    tpot = sorted(tpot) or [0.0]
    prompt = sum(job.request.prompt_tokens for job in jobs)
    return {
        "requests": len(jobs),
        "hit_rate": sum(job.cached_tokens for job in jobs) / prompt,
        "host_hit_rate": sum(job.host_tokens for job in jobs) / prompt,
        "ttft_s": {
            "mean": fmean(ttft),
            "p50": quantile(ttft, 0.5),
            "p90": quantile(ttft, 0.9),
            "p99": quantile(ttft, 0.99),
        },
        "tpot_s": {"p50": quantile(tpot, 0.5), "p99": quantile(tpot, 0.99)},
        "goodput": good / len(jobs),
        "load_max_over_mean": max(computed.values()) / (sum(computed.values()) / len(world.engines)),
    }


def combine(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over seeds, key by key; `ttft_spread` is (highest − lowest) ÷ median of the mean TTFTs."""
    means = [row["ttft_s"]["mean"] for row in rows]
    return {**_median_of(rows), "ttft_spread": (max(means) - min(means)) / median(means)}


def _median_of(rows: Sequence[Any]) -> Any:
    if isinstance(rows[0], dict):
        return {key: _median_of([row[key] for row in rows]) for key in rows[0]}
    return median(rows)

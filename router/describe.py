"""What the core says of itself: decisions in words and numbers, records for the log, samples for the metrics page."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from router.contract.events import Tier
from router.fleet.rank import Rank
from router.fleet.worker import Worker
from router.observe.metrics import RankSample, WorkerSample
from router.observe.views import capacity_blocks
from router.pairs.decode import DecodeChoice
from router.policy.decide import Scored
from router.proxy.plan import RequestRecord


def explained(scored: Scored[Rank]) -> dict[str, Any]:
    rank = scored.target
    cached: dict[str, int] = {}
    faster = -1
    for tier in Tier:  # a slower tier that adds nothing is left out, GPU is always there
        if scored.cached_by_tier[tier] > faster:
            cached[tier.name] = faster = scored.cached_by_tier[tier]
    return {
        "worker": rank.worker.url.text,
        "rank": rank.number,
        "state": rank.state,
        "cached_tokens": cached,
        "predicted_tokens": max(0, scored.predicted_tokens - scored.cached_by_tier[3]),
        "uncached_tokens": scored.uncached_tokens,
        "inflight_tokens": rank.account.tokens,
        "cost_s": round(scored.cost_s, 6),
        "cost_terms_tokens": {
            "queue": round(scored.terms.queue, 1),
            "prefill": round(scored.terms.prefill, 1),
            "share": round(scored.terms.share, 1),
        },
    }


def explained_decode(choice: DecodeChoice[Rank]) -> dict[str, Any]:
    """The second half of a pair, with every candidate. `cost` is a share of the rank (router.pairs.decode)."""
    chosen = choice.chosen.target
    return {
        "worker": chosen.worker.url.text,
        "rank": chosen.number,
        "candidates": [
            {
                "worker": scored.target.worker.url.text,
                "rank": scored.target.number,
                "cached_tokens": scored.load.cached_tokens,
                "used_tokens": scored.load.used_tokens,
                "capacity_tokens": scored.load.capacity_tokens,
                "requests": scored.load.requests,
                "fits": scored.fits,
                "cost": round(scored.cost, 6),
            }
            for scored in choice.scored
        ],
    }


def record_fields(record: RequestRecord) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record) if field.name != "usage"}


def worker_sample(worker: Worker, now_s: float) -> WorkerSample:
    return WorkerSample(
        worker.url.text,
        worker.routable,
        tuple(worker.drifts),
        capacity_blocks(worker),
        worker.breaker.state != "closed",
        worker.role,
        [_rank_sample(rank, now_s) for rank in worker.ranks],
    )


def _rank_sample(rank: Rank, now_s: float) -> RankSample:
    load = rank.account
    return RankSample(
        rank=rank.number,
        state=rank.state,
        blocks=rank.blocks(),
        inflight_requests=load.requests,
        inflight_tokens=load.tokens,
        queued_tokens=load.queue_tokens(now_s, 0.0),
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        tally=replace(rank.tally),
    )

"""What the live page is sent: the fleet and the last decisions as compact JSON-able values. Pure.

Ranks are arrays, not objects (RANK_FIELDS names the places): a fleet of 500 is sent every second.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from typing import Any

from router.contract.events import Tier
from router.fleet.rank import Rank
from router.fleet.worker import Worker
from router.observe.requests import Placed
from router.policy.decide import Decision, Scored

RANK_FIELDS = (
    "rank",
    "state",
    "reason",
    "blocks_gpu",
    "blocks",
    "running",
    "queued_tokens",
    "tokens_per_s",
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "stored",
)
CANDIDATE_FIELDS = (
    "worker",
    "rank",
    "state",
    "cached",
    "predicted",
    "queue",
    "prefill",
    "share",
    "cost_s",
)
MAX_CANDIDATES = 8
"""Of one decision: the chosen, the one that holds most, and the cheapest others."""


def worker_view(worker: Worker, now_s: float) -> dict[str, Any]:
    info, scheme = worker.info, worker.scheme
    view: dict[str, Any] = {
        "url": worker.url.text,
        "state": worker.state,
        "reason": worker.reason,
        "model": worker.models[0] if worker.models else None,
        "role": worker.role,
        "capacity_blocks": capacity_blocks(worker),
        "ranks": [_rank_view(rank, now_s) for rank in worker.ranks],
    }
    if worker.drifts:
        view["drift"] = [
            {
                "kind": drift.kind,
                "advertised": drift.advertised,
                "observed": drift.observed,
                "since_s": round(now_s - drift.since_s),
                "advice": drift.advice,
            }
            for drift in worker.drifts.values()
        ]
    if info is not None:
        view["engine"] = f"{info.engine} {info.version or ''}".strip()
    if scheme is not None:
        view["block_size"] = scheme.scheme.width
    return view


def capacity_blocks(worker: Worker) -> int | None:
    """KV blocks of one rank on the GPU; None where the engine does not say."""
    if worker.info is None or worker.scheme is None or not worker.info.max_total_tokens:
        return None
    return worker.info.max_total_tokens // worker.scheme.scheme.width


def _rank_view(rank: Rank, now_s: float) -> list[Any]:
    blocks, tally, load = rank.blocks(), rank.tally, rank.account
    reported = tally.reported_cached_tokens > 0
    rate = load.prefill_tokens_per_s
    return [
        rank.number,
        rank.state,
        "" if rank.state == "live" else rank.reason,
        blocks.get(Tier.GPU.name, 0),
        sum(blocks.values()),
        load.requests,
        round(load.queue_tokens(now_s, 0.0)),
        None if rate is None else round(rate),
        tally.requests,
        tally.reported_prompt_tokens if reported else tally.prompt_tokens,
        tally.reported_cached_tokens if reported else tally.predicted_cached_tokens,
        rank.ledger.counters.stored if rank.ledger is not None else 0,
    ]


def decision_view(placed: Placed, now_s: float) -> dict[str, Any]:
    """One decision with its explanation; how it ended comes with `ending_view` when it does."""
    decision = placed.decision
    chosen = decision.chosen
    rank: Rank = chosen.target
    return {
        "number": placed.number,
        "age_s": round(now_s - placed.at_s, 2),
        "request_id": placed.request_id,
        "route": placed.route,
        "model": placed.model,
        "ids": placed.ids_source,
        "ids_reason": placed.ids_reason,
        "prompt_tokens": placed.prompt_tokens,
        "worker": rank.worker.url.text,
        "rank": rank.number,
        **({"decode": [placed.decode.worker.url.text, placed.decode.number]} if placed.decode is not None else {}),
        "reason": decision.reason,
        "cached": chosen.cached_by_tier[3],
        "predicted": chosen.predicted_tokens,
        "best": decision.best_cached_tokens,
        "cost_s": round(chosen.cost_s, 5),
        "of": len(decision.targets),
        "candidates": [_candidate_view(scored) for scored in telling(decision)],
        **({"end": ending_view(placed)} if is_over(placed) else {}),
    }


def telling(decision: Decision[Rank]) -> Sequence[Scored[Rank]]:
    """The candidates that explain the choice, cheapest first."""
    everyone = range(len(decision.targets))
    cheapest = nsmallest(MAX_CANDIDATES - 2, everyone, key=decision.cost_s.__getitem__)
    holder = max(everyone, key=lambda at: decision.credits[at][4])
    told = {*cheapest, holder, decision.position}
    return sorted((decision.at(at) for at in told), key=lambda scored: scored.cost_s)


def _candidate_view(scored: Scored[Rank]) -> list[Any]:
    rank, terms = scored.target, scored.terms
    return [
        rank.worker.url.text,
        rank.number,
        rank.state,
        scored.cached_by_tier[3],
        scored.predicted_tokens,
        round(terms.queue),
        round(terms.prefill),
        round(terms.share),
        round(scored.cost_s, 5),
    ]


def is_over(placed: Placed) -> bool:
    return placed.record is not None or placed.retried


def ending_view(placed: Placed) -> dict[str, Any]:
    """How a placement ended; only for one that is over."""
    record = placed.record
    if record is None:
        return {"outcome": "retried elsewhere"}
    usage = record.usage
    return {
        "outcome": str(record.outcome),
        "status": record.status,
        "ttft_s": None if record.ttft_s is None else round(record.ttft_s, 4),
        "duration_s": round(record.duration_s, 3),
        "prompt": usage.prompt_tokens if usage is not None else None,
        "reported": usage.cached_tokens if usage is not None else None,
        "completion": usage.completion_tokens if usage is not None else None,
    }

"""Decisions and records for tests of what is shown, logged and traced."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, cast

from router.contract.url import WorkerUrl
from router.fleet.rank import Rank
from router.observe.requests import Requests
from router.policy.cost import CostWeights
from router.policy.decide import Asked, Decision, Policy
from router.policy.load import RankLoad
from router.proxy.plan import Outcome, RequestRecord, Usage


@dataclass
class StandInWorker:
    url: WorkerUrl


@dataclass
class StandInRank:
    """As much of a fleet's rank as a decision and its views read."""

    worker: StandInWorker
    number: int
    slot: int
    state: str = "live"
    account: RankLoad = field(default_factory=RankLoad)

    @property
    def credit_slot(self) -> int:
        return self.slot


def fleet_of(ranks: int) -> list[Rank]:
    return [
        cast(Rank, StandInRank(StandInWorker(WorkerUrl.parse(f"http://engine-{n}:30000")), 0, n)) for n in range(ranks)
    ]


def decision(held: list[int], prompt_tokens: int = 1000) -> Decision[Rank]:
    """By policy kv over as many idle ranks as there are numbers of cached tokens."""
    policy = Policy("kv", CostWeights(), default_rate_tokens_per_s=8000, rng=random.Random(1))
    credits = {slot: (tokens,) * 5 for slot, tokens in enumerate(held)}
    return policy.decide(Asked(prompt_tokens), fleet_of(len(held)), credits, 0.0)


def place(requests: Requests, request_id: str = "r1", held: tuple[int, ...] = (0, 640), **more: Any) -> None:
    settings: dict[str, Any] = {
        "at_s": 5.0,
        "route": "/v1/completions",
        "model": "tiny",
        "ids_source": "local",
        "ids_reason": "",
        "prompt_tokens": 1000,
    }
    requests.placed(request_id=request_id, decision=decision(list(held)), **{**settings, **more})


def record(request_id: str = "r1", **more: Any) -> RequestRecord:
    settings: dict[str, Any] = {
        "method": "POST",
        "route": "/v1/completions",
        "outcome": Outcome.OK,
        "status": 200,
        "error": None,
        "worker": "http://engine-1:30000",
        "attempts": 1,
        "duration_s": 0.25,
        "ttft_s": 0.125,
        "usage": Usage(1000, 624, 16),
    }
    return RequestRecord(request_id=request_id, **{**settings, **more})

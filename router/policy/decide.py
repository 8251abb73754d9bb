"""Candidates in, one decision with its explanation out. Pure: randomness and time are passed in."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from router.policy.cost import CostTerms, CostWeights, attention_factor, cost, work_tokens
from router.policy.load import RankLoad

NO_TIERS = (0, 0, 0, 0)

REASONS: dict[str, str] = {
    "only": "one candidate: nothing to choose",
    "prefix": "the lowest cost, and no rank holds more of the prefix",
    "balance": "another rank holds more of the prefix, but its queue costs more than the prefill saved",
    "load": "no rank holds any of the prefix: the least loaded",
    "no_tokens": "the prompt's token ids are unknown: the least loaded",
    "client_rank": "the client named the data-parallel rank: only that rank of each worker was considered",
    "overlap": "policy overlap: the longest resident prefix, ties by load",
    "round_robin": "policy round_robin: the next in turn",
    "random": "policy random",
    "least_inflight": "policy least_inflight: the fewest own requests in flight",
    "power_of_two": "policy power_of_two: the less loaded of two drawn at random",
}
"""Decision reasons: label of decisions_total, `reason` of /route. The README's table is tested against this."""


@dataclass(slots=True)
class Candidate:
    """One (worker, rank) a request could go to. Tokens by tier are cumulative and already capped as the engine caps."""

    ref: Any
    worker: str
    rank: int
    state: str
    load: RankLoad
    cached_by_tier: tuple[int, int, int, int] = NO_TIERS
    predicted_tokens: int = 0
    """Credit including blocks only predicted; at least cached_by_tier[3]."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the request needs. prompt_tokens is an estimate when `ids_known` is false."""

    prompt_tokens: int
    ids_known: bool = True
    client_rank: int | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    candidate: Candidate
    uncached_tokens: int
    terms: CostTerms
    cost_s: float


@dataclass(frozen=True, slots=True)
class Decision:
    """`ranked` holds every candidate in the given order; `chosen` is one of them."""

    chosen: Scored
    reason: str
    best_cached_tokens: int
    """The most any candidate holds (best_cached_tokens_total)."""
    scored: tuple[Scored, ...]


class Policy:
    """A named rule with the little state some of them need (whose turn it is)."""

    def __init__(
        self, name: str, weights: CostWeights, *, default_rate_tokens_per_s: float, rng: random.Random
    ) -> None:
        if name not in _RULES:
            raise ValueError(f"policy {name!r} is not one of {', '.join(_RULES)}")
        self.name = name
        self.weights = weights
        self._default_rate = default_rate_tokens_per_s
        self._rng = rng
        self._turn = 0

    def decide(self, asked: Asked, candidates: Sequence[Candidate], now_s: float) -> Decision:
        """Chooses one of `candidates` (never empty)."""
        measured = [c.load.prefill_tokens_per_s for c in candidates if c.load.prefill_tokens_per_s is not None]
        unmeasured_rate = median(measured) if measured else self._default_rate
        scored = tuple(self._score(asked, c, now_s, unmeasured_rate) for c in candidates)
        chosen, reason = _RULES[self.name](self, scored, asked)
        best = max(c.cached_by_tier[3] for c in candidates)
        return Decision(chosen, reason, best, scored)

    def _score(self, asked: Asked, candidate: Candidate, now_s: float, unmeasured_rate: float) -> Scored:
        load, weights = candidate.load, self.weights
        rate = load.prefill_tokens_per_s or unmeasured_rate
        cached = candidate.cached_by_tier
        extra = max(0, candidate.predicted_tokens - cached[3])
        believed = (cached[0] + extra, cached[1] + extra, cached[2] + extra, cached[3] + extra) if extra else cached
        terms = cost(
            queue_tokens=load.queue_tokens(now_s, rate * weights.age_rate_factor),
            work=work_tokens(asked.prompt_tokens, believed, weights),
            attention=attention_factor(asked.prompt_tokens, believed[3], weights),
            decoding=load.decoding,
            share_tokens=load.share_tokens(now_s, weights.share_tau_s),
            weights=weights,
        )
        return Scored(candidate, asked.prompt_tokens - cached[3], terms, terms.total / rate)

    def _lowest(self, scored: Sequence[Scored], key: Callable[[Scored], Any]) -> Scored:
        """The minimum, exact ties at random (public case 50)."""
        best = min(key(s) for s in scored)
        ties = [s for s in scored if key(s) == best]
        return ties[0] if len(ties) == 1 else self._rng.choice(ties)

    def _kv(self, scored: tuple[Scored, ...], asked: Asked) -> tuple[Scored, str]:
        chosen = self._lowest(scored, lambda s: s.terms.total)
        if asked.client_rank is not None:
            return chosen, "client_rank"
        if len(scored) == 1:
            return chosen, "only"
        if not asked.ids_known:
            return chosen, "no_tokens"
        most = max(s.candidate.predicted_tokens for s in scored)
        if not most:
            return chosen, "load"
        return chosen, "prefix" if chosen.candidate.predicted_tokens == most else "balance"

    def _overlap(self, scored: tuple[Scored, ...], asked: Asked) -> tuple[Scored, str]:
        return self._lowest(scored, lambda s: (-s.candidate.cached_by_tier[3], s.terms.queue)), "overlap"

    def _round_robin(self, scored: tuple[Scored, ...], asked: Asked) -> tuple[Scored, str]:
        in_order = sorted(scored, key=lambda s: (s.candidate.rank, s.candidate.worker))
        chosen = in_order[self._turn % len(in_order)]
        self._turn += 1
        return chosen, "round_robin"

    def _random(self, scored: tuple[Scored, ...], asked: Asked) -> tuple[Scored, str]:
        return self._rng.choice(scored), "random"

    def _least_inflight(self, scored: tuple[Scored, ...], asked: Asked) -> tuple[Scored, str]:
        return self._lowest(scored, lambda s: s.candidate.load.requests), "least_inflight"

    def _power_of_two(self, scored: tuple[Scored, ...], asked: Asked) -> tuple[Scored, str]:
        pair = self._rng.sample(scored, min(2, len(scored)))
        return self._lowest(pair, lambda s: s.candidate.load.requests), "power_of_two"


_RULES: dict[str, Callable[[Policy, tuple[Scored, ...], Asked], tuple[Scored, str]]] = {
    "kv": Policy._kv,
    "overlap": Policy._overlap,
    "round_robin": Policy._round_robin,
    "random": Policy._random,
    "least_inflight": Policy._least_inflight,
    "power_of_two": Policy._power_of_two,
}
POLICY_NAMES = tuple(_RULES)

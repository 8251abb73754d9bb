"""Ranks in, one decision with its explanation out. Pure: randomness and time are passed in.

`Policy.decide` runs for every request over every rank of the fleet, so it is one loop over plain attributes: about
0.8 µs a rank. What it computed stays in the Decision as columns of numbers; objects are made only for who asks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

from router.policy.consistent import meeting_key, meeting_place
from router.policy.cost import CostTerms, CostWeights, attention_factor, work_tokens
from router.policy.load import RankLoad

Credit = tuple[int, int, int, int, int]
"""Tokens of one prompt that a rank holds: by tier, cumulative (that tier or a faster one, fastest first), capped as the
engine caps it; then the same with blocks only predicted, at least the fourth."""
NO_CREDIT: Credit = (0, 0, 0, 0, 0)
NO_SLOT = -1
"""`credit_slot` of a rank that may not earn credit: never a key of `credits`."""
MEDIAN_EVERY_S = 1.0

REASONS: dict[str, str] = {
    "only": "one candidate: nothing to choose",
    "prefix": "the lowest cost, and no rank holds more of the prefix",
    "balance": "another rank holds more of the prefix, but its queue costs more than the prefill saved",
    "load": "no rank holds any of the prefix: the least loaded",
    "consistent": "idle ranks that cost the same and hold the same: the one any router would choose for this prefix",
    "no_tokens": "the prompt's token ids are unknown: the least loaded",
    "client_rank": "the client named the data-parallel rank: only that rank of each worker was considered",
    "plain_pool": "a plain engine: the prompt is short, or moving it from a prefill engine costs more than that saves",
    "overlap": "policy overlap: the longest resident prefix, ties by load",
    "round_robin": "policy round_robin: the next in turn",
    "random": "policy random",
    "least_inflight": "policy least_inflight: the fewest requests in flight",
    "power_of_two": "policy power_of_two: the less loaded of two drawn at random",
}
"""Decision reasons: label of decisions_total, `reason` of /route. The README's table is tested against this."""


class Target(Protocol):
    """One (worker, rank) a request could go to."""

    account: RankLoad
    number: int
    """The rank's number in its worker."""
    anchor: int
    """What stands for it in every router (router.policy.consistent.anchor)."""

    @property
    def credit_slot(self) -> int:
        """Its slot in the index while its stream is trusted, else NO_SLOT."""


T = TypeVar("T", bound=Target)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the request needs. prompt_tokens is an estimate when `ids_known` is false. `chain`: its block keys, `width`
    tokens each; empty when they are not known."""

    prompt_tokens: int
    ids_known: bool = True
    client_rank: int | None = None
    chain: Sequence[int] = ()
    width: int = 1


@dataclass(frozen=True, slots=True)
class Scored(Generic[T]):
    """One candidate of a decision: what it holds and what it would have cost."""

    target: T
    cached_by_tier: tuple[int, int, int, int]
    predicted_tokens: int
    """Credit including blocks only predicted; at least cached_by_tier[3]."""
    uncached_tokens: int
    terms: CostTerms
    cost_s: float


class Decision(Generic[T]):
    """The chosen rank and, as columns in the order of `targets`, every candidate's numbers at that moment."""

    __slots__ = (
        "_most_believed",
        "_queue",
        "_share",
        "_work",
        "best_cached_tokens",
        "chosen",
        "cost_s",
        "credits",
        "prompt_tokens",
        "reason",
        "targets",
    )

    def __init__(self, prompt_tokens: int, targets: Sequence[T], credits: list[Credit]) -> None:
        self.prompt_tokens = prompt_tokens
        self.targets = targets
        self.credits = credits
        self.cost_s: list[float] = []
        self.reason = ""
        self.chosen: Scored[T]
        self.best_cached_tokens = 0
        """The most any candidate holds (best_cached_tokens_total)."""
        self._most_believed = 0
        self._queue: list[float] = []
        self._work: list[float] = []
        self._share: list[float] = []

    @property
    def scored(self) -> tuple[Scored[T], ...]:
        """Every candidate with its terms, in the given order."""
        return tuple(self.at(position) for position in range(len(self.targets)))

    @property
    def blind_cached_tokens(self) -> float:
        """The candidates' mean: what a choice that knows nothing of caches would have found."""
        return sum([credit[3] for credit in self.credits]) / len(self.credits) if self.best_cached_tokens else 0.0

    def at(self, position: int) -> Scored[T]:
        a, b, c, d, believed = self.credits[position]
        return Scored(
            self.targets[position],
            (a, b, c, d),
            believed,
            self.prompt_tokens - d,
            CostTerms(self._queue[position], self._work[position], self._share[position]),
            self.cost_s[position],
        )


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
        self._median_rate = default_rate_tokens_per_s
        self._median_at_s = -math.inf

    def decide(self, asked: Asked, targets: Sequence[T], credits: Mapping[int, Credit], now_s: float) -> Decision[T]:
        """Chooses one of `targets` (never empty). `credits` by `credit_slot`; absent means nothing is held there."""
        get = credits.get
        held = [get(target.credit_slot, NO_CREDIT) for target in targets] if credits else [NO_CREDIT] * len(targets)
        decision = Decision(asked.prompt_tokens, targets, held)
        self._score(decision, now_s)
        position, decision.reason = _RULES[self.name](self, decision, asked)
        decision.chosen = decision.at(position)
        return decision

    def _score(self, decision: Decision[T], now_s: float) -> None:
        """Fills the columns. The formula is router.policy.cost's, written out for speed; a test holds them equal."""
        weights = self.weights
        u_weight, decode_weight, share_weight = weights.u_weight, weights.decode_weight, weights.share_weight
        age_factor, tau_s = weights.age_rate_factor, weights.share_tau_s
        typical_rate = self._typical_rate(decision.targets, now_s)
        slowest, fastest = typical_rate / weights.same_speed, typical_rate * weights.same_speed
        prompt_tokens = decision.prompt_tokens
        works: dict[int, float] = {}  # by identity: ranks that hold the same share one object, hashing it costs more
        exp = math.exp
        best = believed = 0
        queues, prefills, shares = decision._queue.append, decision._work.append, decision._share.append
        costs = decision.cost_s.append
        for target, credit in zip(decision.targets, decision.credits, strict=True):
            load = target.account
            rate = load.prefill_tokens_per_s or typical_rate
            if slowest < rate < fastest:
                rate = typical_rate
            queue: float = load.queued_uncached_tokens
            aged = (now_s - load.oldest_placed_s) * rate * age_factor
            if aged > queue:
                queue = aged
            if now_s <= load.reported_until_s and load.reported_queue_tokens > queue:
                queue = load.reported_queue_tokens
            work = works.get(id(credit))
            if work is None:
                work = works[id(credit)] = _stretched_work(prompt_tokens, credit, weights)
                best, believed = max(best, credit[3]), max(believed, credit[4])
            work *= u_weight + decode_weight * load.decoding
            share = load.share_sum_tokens
            if share:
                age_s = now_s - load.share_at_s
                share *= share_weight * exp(-age_s / tau_s) if age_s > 0 else share_weight
            queues(queue)
            prefills(work)
            shares(share)
            costs((queue + work + share) / rate)
        decision.best_cached_tokens, decision._most_believed = best, believed

    def _typical_rate(self, targets: Sequence[Target], now_s: float) -> float:
        """The fleet's median speed, also for ranks that report none; renewed once a second."""
        if not 0 <= now_s - self._median_at_s < MEDIAN_EVERY_S:
            measured = [rate for t in targets if (rate := t.account.prefill_tokens_per_s) is not None]
            self._median_rate = median(measured) if measured else self._default_rate
            self._median_at_s = now_s
        return self._median_rate

    def _lowest(self, values: Sequence[Any]) -> int:
        """Where the minimum is, exact ties at random (public case 50)."""
        best = min(values)
        if values.count(best) == 1:
            return values.index(best)
        return self._rng.choice([position for position, value in enumerate(values) if value == best])

    def _kv(self, decision: Decision[T], asked: Asked) -> tuple[int, str]:
        position = self._lowest(decision.cost_s)
        if asked.client_rank is not None:
            return position, "client_rank"
        if len(decision.targets) == 1:
            return position, "only"
        if not asked.ids_known:
            return position, "no_tokens"
        if asked.chain and (meeting := self._meeting(decision, asked, position)) is not None:
            return meeting, "consistent"
        if not decision._most_believed:
            return position, "load"
        return position, "prefix" if decision.credits[position][4] == decision._most_believed else "balance"

    def _meeting(self, decision: Decision[T], asked: Asked, best: int) -> int | None:
        """Among idle ranks as good as `best`, the one on which all routers agree; None when there is no other. Busy
        ranks are told apart by their load even where that costs a copy of the prefix."""
        held, queues, credits = decision._most_believed, decision._queue, decision.credits
        if queues[best] or credits[best][4] != held:
            return None
        limit = decision.cost_s[best] * (1 + self.weights.consistent_tolerance)
        near = [
            i for i, cost_s in enumerate(decision.cost_s) if cost_s <= limit and not queues[i] and credits[i][4] == held
        ]
        if len(near) < 2:
            return None
        key = meeting_key(asked.chain, asked.width, held)
        return near[meeting_place(key, [decision.targets[i].anchor for i in near])]

    def _overlap(self, decision: Decision[T], asked: Asked) -> tuple[int, str]:
        keys = [(-credit[3], queue) for credit, queue in zip(decision.credits, decision._queue, strict=True)]
        return self._lowest(keys), "overlap"

    def _round_robin(self, decision: Decision[T], asked: Asked) -> tuple[int, str]:
        numbers = [target.number for target in decision.targets]
        in_order = sorted(range(len(numbers)), key=numbers.__getitem__)  # every worker before its next rank
        position = in_order[self._turn % len(in_order)]
        self._turn += 1
        return position, "round_robin"

    def _random(self, decision: Decision[T], asked: Asked) -> tuple[int, str]:
        return self._rng.randrange(len(decision.targets)), "random"

    def _least_inflight(self, decision: Decision[T], asked: Asked) -> tuple[int, str]:
        return self._lowest([_requests(target) for target in decision.targets]), "least_inflight"

    def _power_of_two(self, decision: Decision[T], asked: Asked) -> tuple[int, str]:
        count = len(decision.targets)
        pair = self._rng.sample(range(count), min(2, count))
        lowest = self._lowest([_requests(decision.targets[position]) for position in pair])
        return pair[lowest], "power_of_two"


def _requests(target: Target) -> int:
    """In flight there, those of sibling routers too."""
    return target.account.requests + target.account.sibling_requests


def _stretched_work(prompt_tokens: int, credit: Credit, weights: CostWeights) -> float:
    """Prefill work of the prompt where `credit` is held, predicted blocks taken as held in the fastest tier."""
    a, b, c, d, believed = credit
    extra = max(0, believed - d)
    work = work_tokens(prompt_tokens, (a + extra, b + extra, c + extra, d + extra), weights)
    return work * attention_factor(prompt_tokens, d + extra, weights)


_RULES: dict[str, Callable[[Policy, Decision[Any], Asked], tuple[int, str]]] = {
    "kv": Policy._kv,
    "overlap": Policy._overlap,
    "round_robin": Policy._round_robin,
    "random": Policy._random,
    "least_inflight": Policy._least_inflight,
    "power_of_two": Policy._power_of_two,
}
POLICY_NAMES = tuple(_RULES)

"""Ranks in, one decision with its explanation out. Pure: randomness and time are passed in.

`Policy.decide` runs for every request over every rank of the fleet, so it is one loop over plain attributes: about
0.4 µs a rank. What it computed stays in the Decision as columns of numbers; objects are made only for who asks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from router.policy.consistent import meeting_key, meeting_place
from router.policy.cost import CostTerms, CostWeights
from router.policy.load import RankLoad

Credit = tuple[int, ...]
"""Tokens of one prompt that a rank holds: by tier, cumulative (that tier or a faster one, fastest first), capped as the
engine caps it; then the same with blocks only predicted, at least the fourth. These are five; the type does not say so,
because compiled code would take them out of their object and make a new one wherever its identity is asked for."""
NO_CREDIT: Credit = (0, 0, 0, 0, 0)
NO_SLOT: Final = -1
"""`credit_slot` of a rank that may not earn credit: never a key of `credits`."""
MEDIAN_EVERY_S: Final = 1.0

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


class Asked:
    """What the request needs. prompt_tokens is an estimate when `ids_known` is false. `chain`: its block keys, `width`
    tokens each; empty when they are not known."""

    __slots__ = ("chain", "client_rank", "ids_known", "prompt_tokens", "width")

    def __init__(
        self,
        prompt_tokens: int,
        ids_known: bool = True,
        client_rank: int | None = None,
        chain: Sequence[int] = (),
        width: int = 1,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.ids_known = ids_known
        self.client_rank = client_rank
        self.chain = chain
        self.width = width


class Scored(NamedTuple, Generic[T]):
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
        "_terms",
        "best_cached_tokens",
        "cost_s",
        "credits",
        "position",
        "prompt_tokens",
        "reason",
        "targets",
    )

    def __init__(
        self,
        prompt_tokens: int,
        targets: Sequence[T],
        credits: list[Credit],
        cost_s: list[float],
        terms: list[float],
        best_cached_tokens: int,
        most_believed: int,
    ) -> None:
        """`terms`: three a candidate, as in CostTerms; not tuples, which the collector would look at. Chosen is nobody
        yet."""
        self.prompt_tokens = prompt_tokens
        self.targets = targets
        self.credits = credits
        self.cost_s = cost_s
        self._terms = terms
        self.best_cached_tokens = best_cached_tokens
        """The most any candidate holds (best_cached_tokens_total)."""
        self._most_believed = most_believed
        self.position: int
        """Of the chosen one."""
        self.reason: str

    @property
    def chosen(self) -> Scored[T]:
        """Made anew for whoever asks: a request itself needs only its target and credit."""
        return self.at(self.position)

    @property
    def scored(self) -> tuple[Scored[T], ...]:
        """Every candidate with its terms, in the given order."""
        return tuple([self.at(position) for position in range(len(self.targets))])

    @property
    def blind_cached_tokens(self) -> float:
        """The candidates' mean: what a choice that knows nothing of caches would have found."""
        return sum([credit[3] for credit in self.credits]) / len(self.credits) if self.best_cached_tokens else 0.0

    def at(self, position: int) -> Scored[T]:
        a, b, c, d, believed = self.credits[position]
        queue, work, share = self._terms[3 * position : 3 * position + 3]
        return Scored(
            self.targets[position],
            (a, b, c, d),
            believed,
            self.prompt_tokens - d,
            CostTerms(queue, work, share),
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
        self._rule = _RULES[name]
        self._default_rate = default_rate_tokens_per_s
        self._rng = rng
        self._turn = 0
        self._median_rate = default_rate_tokens_per_s
        self._median_at_s = -math.inf

    def decide(self, asked: Asked, targets: Sequence[T], credits: Mapping[int, Credit], now_s: float) -> Decision[T]:
        """Chooses one of `targets` (never empty). `credits` by `credit_slot`; absent means nothing is held there."""
        decision = self._score(asked.prompt_tokens, targets, credits, now_s)
        decision.position, decision.reason = self._rule(self, decision, asked)
        return decision

    def _score(
        self, prompt_tokens: int, targets: Sequence[T], credits: Mapping[int, Credit], now_s: float
    ) -> Decision[T]:
        """The columns. The formula is router.policy.cost's, written out for speed; a test holds them equal. An idle
        rank's terms are found by comparisons alone."""
        weights = self.weights
        u_weight, decode_weight, share_weight = weights.u_weight, weights.decode_weight, weights.share_weight
        age_factor, tau_s = weights.age_rate_factor, weights.share_tau_s
        typical_rate = self._typical_rate(targets, now_s)
        slowest, fastest = typical_rate / weights.same_speed, typical_rate * weights.same_speed
        works: dict[int, float] = {}  # by identity: ranks that hold the same share one object, hashing it costs more
        best, believed = 0, 0
        credit: Credit | None = None
        stretched, alone = 0.0, 0.0
        decayed_s, decay = math.nan, 0.0
        held_credits: list[Credit] = []
        costs: list[float] = []
        terms: list[float] = []
        for target in targets:
            held = credits.get(target.credit_slot, NO_CREDIT)
            held_credits.append(held)
            if held is not credit:
                credit = held
                known = works.get(id(held))
                if known is None:
                    known = works[id(held)] = _stretched_work(prompt_tokens, held, weights)
                    best, believed = max(best, held[3]), max(believed, held[4])
                stretched = known
                alone = stretched * u_weight
            load = target.account
            rate = load.prefill_tokens_per_s
            if not rate or slowest < rate < fastest:
                rate = typical_rate
            queue = 0.0
            if load.queued_uncached_tokens:
                queue = float(load.queued_uncached_tokens)
            if load.oldest_placed_s < now_s:
                aged = (now_s - load.oldest_placed_s) * rate * age_factor
                if aged > queue:
                    queue = aged
            if now_s <= load.reported_until_s and load.reported_queue_tokens > queue:
                queue = float(load.reported_queue_tokens)
            work = stretched * (u_weight + decode_weight * load.decoding) if load.decoding else alone
            if load.share_at_s != decayed_s:  # mostly all ranks' sums are as of one time
                decayed_s = load.share_at_s
                age_s = now_s - decayed_s
                decay = share_weight * math.exp(-age_s / tau_s) if age_s > 0 else share_weight
            share = load.share_sum_tokens * decay
            terms.append(queue)
            terms.append(work)
            terms.append(share)
            costs.append((queue + work + share) / rate)
        return Decision(prompt_tokens, targets, held_credits, costs, terms, best, believed)

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
        if asked.chain and not decision._terms[3 * position]:
            meeting = self._meeting(decision, asked, position)
            if meeting is not None:
                return meeting, "consistent"
        if not decision._most_believed:
            return position, "load"
        return position, "prefix" if decision.credits[position][4] == decision._most_believed else "balance"

    def _meeting(self, decision: Decision[T], asked: Asked, best: int) -> int | None:
        """Among idle ranks as good as `best`, which is one of them, that on which all routers agree; None when there is
        no other. Busy ranks are told apart by their load even where that costs a copy of the prefix."""
        held, terms, credits, costs = decision._most_believed, decision._terms, decision.credits, decision.cost_s
        if credits[best][4] != held:
            return None
        tolerance = self.weights.consistent_tolerance
        if not tolerance and costs.count(costs[best]) == 1:  # it is the lowest, and the only one
            return None
        limit = costs[best] * (1 + tolerance)
        near = [i for i, cost_s in enumerate(costs) if cost_s <= limit and not terms[3 * i] and credits[i][4] == held]
        if len(near) < 2:
            return None
        key = meeting_key(asked.chain, asked.width, held)
        return near[meeting_place(key, [decision.targets[i].anchor for i in near])]

    def _overlap(self, decision: Decision[T], asked: Asked) -> tuple[int, str]:
        keys = [(-credit[3], queue) for credit, queue in zip(decision.credits, decision._terms[::3], strict=True)]
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
    """Prefill work of the prompt where `credit` is held, predicted blocks taken as held in the fastest tier. It is
    `work_tokens` times `attention_factor`, written out."""
    a, b, c, d, believed = credit
    if believed < d:
        believed = d
    gpu, host, disk, external = weights.tier_weights
    work = prompt_tokens - believed + gpu * (a + believed - d)
    if d > a:
        work += host * (b - a) + disk * (c - b) + external * (d - c)
    return work * (1.0 + (believed + prompt_tokens) / 2 / weights.attention_tokens)


_RULES: dict[str, Callable[[Policy, Decision[Any], Asked], tuple[int, str]]] = {
    "kv": Policy._kv,
    "overlap": Policy._overlap,
    "round_robin": Policy._round_robin,
    "random": Policy._random,
    "least_inflight": Policy._least_inflight,
    "power_of_two": Policy._power_of_two,
}
POLICY_NAMES = tuple(_RULES)

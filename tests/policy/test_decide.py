"""Which rank is chosen, and that the explanation says the truth about it."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.consistent import anchor
from router.policy.cost import CostWeights, attention_factor, cost, work_tokens
from router.policy.decide import NO_SLOT, POLICY_NAMES, REASONS, Asked, Credit, Decision, Policy
from router.policy.load import Outstanding, RankLoad, Report


@dataclass(slots=True)
class Spot:
    """A target with what it holds of the prompt in question."""

    name: str
    credit: Credit
    account: RankLoad
    number: int
    credit_slot: int
    anchor: int = 0


def policy(name: str = "kv", seed: int = 1, weights: CostWeights | None = None) -> Policy:
    return Policy(name, weights or CostWeights(), default_rate_tokens_per_s=8000.0, rng=random.Random(seed))


_slots = itertools.count()


def candidate(name: str, cached: int = 0, predicted: int = 0, load: RankLoad | None = None, rank: int = 0) -> Spot:
    credit = (cached, cached, cached, cached, max(predicted, cached))
    return Spot(name, credit, load or RankLoad(), rank, next(_slots), anchor(name, rank))


def decide(rule: Policy, asked: Asked, spots: Sequence[Spot], now_s: float = 0.0) -> Decision[Spot]:
    return rule.decide(asked, spots, {spot.credit_slot: spot.credit for spot in spots if any(spot.credit)}, now_s)


def busy(uncached: int, count: int = 1) -> RankLoad:
    load = RankLoad()
    for _ in range(count):
        load.place(uncached, uncached, 0.0, 120.0)
    return load


def test_the_rank_that_holds_the_prefix_wins_among_idle_ranks() -> None:
    decision = decide(
        policy(), Asked(1000), [candidate("a"), candidate("b", cached=800), candidate("c", cached=400)], 0.0
    )
    assert (decision.chosen.target.name, decision.reason) == ("b", "prefix")
    assert (decision.best_cached_tokens, decision.chosen.uncached_tokens) == (800, 200)


def test_a_warm_saturated_rank_loses_to_a_cold_idle_one() -> None:
    """case 49"""
    decision = decide(policy(), Asked(1000), [candidate("warm", 900, load=busy(5000)), candidate("cold")], 0.0)
    assert (decision.chosen.target.name, decision.reason) == ("cold", "balance")


def test_a_hot_prefix_spreads_instead_of_melting_one_rank() -> None:
    """case 49: 8 ranks, 200 concurrent requests sharing 4k tokens with unique tails"""
    rule, loads, warm = policy(), [RankLoad() for _ in range(8)], {0}
    for _ in range(200):
        ranks = [candidate(str(i), 4000 if i in warm else 0, load=loads[i]) for i in range(8)]
        chosen = int(decide(rule, Asked(4200), ranks, 0.0).chosen.target.name)
        loads[chosen].place(4200, 200 if chosen in warm else 4200, 0.0, 120.0)
        warm.add(chosen)
    work = [load.queued_uncached_tokens for load in loads]
    assert max(work) / (sum(work) / 8) <= 1.3, work
    assert sum(work) <= 0.15 * 200 * 4200 + 8 * 4000, (
        "replicating the prefix to every rank costs it once a rank, not more"
    )


def test_a_miss_goes_by_load_and_not_by_cache_size() -> None:
    """case 51"""
    decision = decide(policy(), Asked(500), [candidate("busy", load=busy(400)), candidate("idle")], 0.0)
    assert (decision.chosen.target.name, decision.reason) == ("idle", "load")


def test_near_equal_load_still_prefers_the_longest_prefix() -> None:
    """case 52: no cliff at a load threshold"""
    decision = decide(
        policy(), Asked(2000), [candidate("holder", 1500, load=busy(300)), candidate("other", load=busy(200))], 0.0
    )
    assert decision.chosen.target.name == "holder"


def test_exact_ties_are_broken_at_random() -> None:
    """case 50"""
    rule = policy()
    ranks = [candidate(name) for name in "abcd"]
    counts = Counter(decide(rule, Asked(100), ranks, 0.0).chosen.target.name for _ in range(400))
    assert min(counts[name] for name in "abcd") > 50


def chosen_for(rule: Policy, chain: Sequence[int], ranks: Sequence[Spot], prompt: int = 5000) -> tuple[str, str]:
    decision = decide(rule, Asked(prompt, chain=chain, width=512), ranks)
    return decision.chosen.target.name, decision.reason


def test_idle_routers_that_know_nothing_send_an_unseen_prefix_to_the_same_rank() -> None:
    chains = [[random.Random(i).getrandbits(64) - (1 << 63) for _ in range(9)] for i in range(400)]
    first, second = policy(seed=1), policy(seed=2)
    ranks, reordered = [candidate(name) for name in "abcd"], [candidate(name) for name in "dbca"]
    picks = [chosen_for(first, chain, ranks) for chain in chains]
    assert picks == [chosen_for(second, chain, reordered) for chain in chains]
    assert {reason for _, reason in picks} == {"consistent"}
    counts = Counter(name for name, _ in picks)
    assert min(counts[name] for name in "abcd") > 60, "unlike prompts still spread (case 50)"
    fewer = [chosen_for(second, chain, [candidate(name) for name in "abd"]) for chain in chains]
    assert all(now == before for now, before in zip(fewer, picks, strict=True) if before[0] != "c"), "only c's move"


def test_conversations_that_share_a_system_prompt_are_told_apart_further_on() -> None:
    """case 49: the first block is everybody's"""
    ranks = [candidate(name, cached=512) for name in "abcd"]
    picks = {chosen_for(policy(), [7, 8, 9, 10, 1000 + i, 5, 6], ranks)[0] for i in range(50)}
    assert picks == set("abcd")
    same = {chosen_for(policy(seed=i), [7, 8, 9, 10, 11, 1000 + i], ranks)[0] for i in range(50)}
    assert len(same) == 1, "what is asked later in one conversation does not matter"


def test_load_decides_between_ranks_that_are_busy_or_hold_more_or_cost_more_than_the_tolerance() -> None:
    chain, strict = list(range(100, 109)), policy()
    assert chosen_for(strict, chain, [candidate("a", load=busy(900)), candidate("b")]) == ("b", "load")
    assert chosen_for(strict, chain, [candidate("a", cached=1024), candidate("b")]) == ("a", "prefix")
    used = RankLoad()
    used.place(9000, 9000, 0.0, 120.0).finish()
    picks = {
        tolerance: {
            chosen_for(policy(weights=weights), [*range(i, i + 9)], [candidate("a", load=used), candidate("b")])[0]
            for i in range(40)
        }
        for tolerance in (0.0, 0.1)
        if (weights := CostWeights(consistent_tolerance=tolerance))
    }
    assert picks == {0.0: {"b"}, 0.1: {"a", "b"}}


def test_blocks_only_predicted_attract_but_are_not_counted_as_cached() -> None:
    """case 53"""
    decision = decide(policy(), Asked(1000), [candidate("a"), candidate("b", predicted=800)], 0.0)
    assert decision.chosen.target.name == "b"
    assert decision.best_cached_tokens == 0
    assert decision.chosen.uncached_tokens == 1000


def test_host_copies_earn_less_than_gpu_copies() -> None:
    """Settled rule 4"""
    host = Spot("h", (0, 800, 800, 800, 800), RankLoad(), 0, next(_slots))
    assert decide(policy(), Asked(1000), [host, candidate("g", 800)], 0.0).chosen.target.name == "g"
    assert decide(policy(), Asked(1000), [host, candidate("none")], 0.0).chosen.target.name == "h"


def test_an_engine_report_of_other_routers_work_is_charged() -> None:
    load = RankLoad()
    load.reported(Report(0.0, 1, 9, waiting_uncached_tokens=50_000))
    decision = decide(policy(), Asked(1000), [candidate("loaded", 900, load=load), candidate("free")], 0.5)
    assert decision.chosen.target.name == "free"


def at_speed(rate: float | None) -> RankLoad:
    return RankLoad(prefill_tokens_per_s=rate)


def test_cost_s_uses_the_ranks_own_speed_or_the_median_of_the_measured() -> None:
    spots = [candidate(name, load=at_speed(rate)) for name, rate in (("f", 40_000.0), ("s", 10_000.0), ("u", None))]
    decision = decide(policy(), Asked(1000), spots)
    by_name = {s.target.name: s for s in decision.scored}
    assert by_name["f"].cost_s == pytest.approx(by_name["f"].terms.total / 40_000)
    assert by_name["u"].cost_s == pytest.approx(by_name["u"].terms.total / 25_000)
    assert decision.chosen.target.name == "f"


def test_speeds_that_hardly_differ_are_one_speed() -> None:
    """A measured speed moves with the context of what was prefilled; that must not move prompts from their prefix."""
    spots = [candidate("holder", 900, load=at_speed(8_000.0)), candidate("other", 880, load=at_speed(11_000.0))]
    assert decide(policy(), Asked(1000), spots).chosen.target.name == "holder"


def test_reasons_name_the_special_situations() -> None:
    assert decide(policy(), Asked(10), [candidate("a")], 0.0).reason == "only"
    assert decide(policy(), Asked(10, ids_known=False), [candidate("a"), candidate("b")], 0.0).reason == "no_tokens"
    assert decide(policy(), Asked(10, client_rank=1), [candidate("a"), candidate("b")], 0.0).reason == "client_rank"


def test_round_robin_visits_workers_before_their_further_ranks() -> None:
    rule = policy("round_robin")
    ranks = [candidate("a", rank=0), candidate("a", rank=1), candidate("b", rank=0), candidate("b", rank=1)]
    seen = [(s.name, s.number) for s in (decide(rule, Asked(9), ranks).chosen.target for _ in range(4))]
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_least_inflight_and_overlap_do_what_their_names_say() -> None:
    ranks = [candidate("a", 100, load=busy(1, 3)), candidate("b", load=busy(1, 1))]
    assert decide(policy("least_inflight"), Asked(200), ranks, 0.0).chosen.target.name == "b"
    assert decide(policy("overlap"), Asked(200), ranks, 0.0).chosen.target.name == "a"
    ranks[1].account.hear(b"sibling", Outstanding(5, 5, 0, 5, math.inf, 0), 0.0, 120.0)
    for name in ("least_inflight", "power_of_two"):
        assert decide(policy(name), Asked(200), ranks, 0.0).chosen.target.name == "a", "a sibling's requests count"


def test_an_unknown_policy_name_is_refused() -> None:
    with pytest.raises(ValueError, match="round_robin"):
        policy("rr")


@given(
    name=st.sampled_from(POLICY_NAMES),
    prompt=st.integers(0, 2_000_000),
    fleet=st.lists(
        st.tuples(st.integers(0, 2_000_000), st.integers(0, 10**9), st.integers(0, 5)), min_size=1, max_size=9
    ),
    now=st.floats(0, 1e9),
)
def test_any_input_gives_a_finite_decision_among_the_candidates(
    name: str, prompt: int, fleet: list[tuple[int, int, int]], now: float
) -> None:
    """case 61"""
    ranks = [candidate(str(i), min(cached, prompt), load=busy(work, n)) for i, (cached, work, n) in enumerate(fleet)]
    decision = decide(policy(name), Asked(prompt), ranks, now)
    assert decision.chosen in decision.scored
    assert decision.reason in REASONS
    assert all(s.terms.total >= 0 and s.terms.total < float("inf") for s in decision.scored)
    assert len(decision.scored) == len(ranks)


@given(
    prompt=st.integers(0, 500_000),
    fleet=st.lists(
        st.tuples(
            st.lists(st.integers(0, 500_000), min_size=5, max_size=5),
            st.integers(0, 10**6),
            st.integers(0, 3),
            st.sampled_from([None, 5_000.0, 40_000.0]),
            st.sampled_from([None, 70_000]),
        ),
        min_size=1,
        max_size=6,
    ),
    now=st.floats(0, 500),
)
def test_the_loop_over_the_fleet_computes_the_formula_of_the_cost_module(
    prompt: int, fleet: list[tuple[list[int], int, int, float | None, int | None]], now: float
) -> None:
    weights, spots = CostWeights(), []
    for held, queued, decoding, rate, reported in fleet:
        load = RankLoad(prefill_tokens_per_s=rate)
        for _ in range(decoding):
            load.place(9, 9, 0.0, 120.0).first_byte()
        if queued:
            load.place(queued, queued, 0.0, 120.0)
        if reported is not None:
            load.reported(Report(0.0, 1, 1, reported))
        a, b, c, d, e = sorted(min(tokens, prompt) for tokens in held)
        spots.append(Spot("s", (a, b, c, d, e), load, 0, next(_slots)))
    decision = decide(policy(), Asked(prompt), spots, now)
    rates = sorted(rate for _, _, _, rate, _ in fleet if rate is not None) or [8000.0]
    middle = (rates[(len(rates) - 1) // 2] + rates[len(rates) // 2]) / 2
    for spot, scored in zip(spots, decision.scored, strict=True):
        rate = spot.account.prefill_tokens_per_s or middle
        rate = middle if middle / weights.same_speed < rate < middle * weights.same_speed else rate
        a, b, c, d, believed = spot.credit
        extra = believed - d
        terms = cost(
            queue_tokens=spot.account.queue_tokens(now, rate * weights.age_rate_factor),
            work=work_tokens(prompt, (a + extra, b + extra, c + extra, d + extra), weights),
            attention=attention_factor(prompt, believed, weights),
            decoding=spot.account.decoding,
            share_tokens=spot.account.share_tokens(now, weights.share_tau_s),
            weights=weights,
        )
        assert scored.terms.total == pytest.approx(terms.total)
        assert scored.cost_s == pytest.approx(terms.total / rate)
        assert decision.chosen.cost_s <= scored.cost_s


def test_a_rank_without_trust_gets_no_credit_for_what_the_index_still_holds() -> None:
    distrusted = candidate("a", 800)
    distrusted.credit_slot = NO_SLOT
    decision = policy().decide(Asked(1000), [distrusted], {next(_slots): (800, 800, 800, 800, 800)}, 0.0)
    assert (decision.chosen.cached_by_tier, decision.best_cached_tokens) == ((0, 0, 0, 0), 0)

"""Which rank is chosen, and that the explanation says the truth about it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy.cost import CostWeights
from router.policy.decide import POLICY_NAMES, REASONS, Asked, Candidate, Policy
from router.policy.load import RankLoad, Report


def policy(name: str = "kv", seed: int = 1) -> Policy:
    return Policy(name, CostWeights(), default_rate_tokens_per_s=8000.0, rng=random.Random(seed))


def candidate(name: str, cached: int = 0, predicted: int = 0, load: RankLoad | None = None, rank: int = 0) -> Candidate:
    tiers = (cached, cached, cached, cached)
    return Candidate(name, name, rank, "live", load or RankLoad(), tiers, max(predicted, cached))


def busy(uncached: int, count: int = 1) -> RankLoad:
    load = RankLoad()
    for _ in range(count):
        load.place(uncached, uncached, 0.0, 120.0)
    return load


def test_the_rank_that_holds_the_prefix_wins_among_idle_ranks() -> None:
    decision = policy().decide(
        Asked(1000), [candidate("a"), candidate("b", cached=800), candidate("c", cached=400)], 0.0
    )
    assert (decision.chosen.candidate.worker, decision.reason) == ("b", "prefix")
    assert (decision.best_cached_tokens, decision.chosen.uncached_tokens) == (800, 200)


def test_a_warm_saturated_rank_loses_to_a_cold_idle_one() -> None:
    """case 49"""
    decision = policy().decide(Asked(1000), [candidate("warm", 900, load=busy(5000)), candidate("cold")], 0.0)
    assert (decision.chosen.candidate.worker, decision.reason) == ("cold", "balance")


def test_a_hot_prefix_spreads_instead_of_melting_one_rank() -> None:
    """case 49: 8 ranks, 200 concurrent requests sharing 4k tokens with unique tails"""
    rule, loads, warm = policy(), [RankLoad() for _ in range(8)], {0}
    for _ in range(200):
        ranks = [candidate(str(i), 4000 if i in warm else 0, load=loads[i]) for i in range(8)]
        chosen = int(rule.decide(Asked(4200), ranks, 0.0).chosen.candidate.worker)
        loads[chosen].place(4200, 200 if chosen in warm else 4200, 0.0, 120.0)
        warm.add(chosen)
    work = [load.queued_uncached_tokens for load in loads]
    assert max(work) / (sum(work) / 8) <= 1.3, work
    assert sum(work) <= 0.15 * 200 * 4200 + 8 * 4000, (
        "replicating the prefix to every rank costs it once a rank, not more"
    )


def test_a_miss_goes_by_load_and_not_by_cache_size() -> None:
    """case 51"""
    decision = policy().decide(Asked(500), [candidate("busy", load=busy(400)), candidate("idle")], 0.0)
    assert (decision.chosen.candidate.worker, decision.reason) == ("idle", "load")


def test_near_equal_load_still_prefers_the_longest_prefix() -> None:
    """case 52: no cliff at a load threshold"""
    decision = policy().decide(
        Asked(2000), [candidate("holder", 1500, load=busy(300)), candidate("other", load=busy(200))], 0.0
    )
    assert decision.chosen.candidate.worker == "holder"


def test_exact_ties_are_broken_at_random() -> None:
    """case 50"""
    rule = policy()
    ranks = [candidate(name) for name in "abcd"]
    counts = Counter(rule.decide(Asked(100), ranks, 0.0).chosen.candidate.worker for _ in range(400))
    assert min(counts[name] for name in "abcd") > 50


def test_blocks_only_predicted_attract_but_are_not_counted_as_cached() -> None:
    """case 53"""
    decision = policy().decide(Asked(1000), [candidate("a"), candidate("b", predicted=800)], 0.0)
    assert decision.chosen.candidate.worker == "b"
    assert decision.best_cached_tokens == 0
    assert decision.chosen.uncached_tokens == 1000


def test_host_copies_earn_less_than_gpu_copies() -> None:
    """Settled rule 4"""
    host = Candidate("h", "h", 0, "live", RankLoad(), (0, 800, 800, 800), 800)
    assert policy().decide(Asked(1000), [host, candidate("g", 800)], 0.0).chosen.candidate.worker == "g"
    assert policy().decide(Asked(1000), [host, candidate("none")], 0.0).chosen.candidate.worker == "h"


def test_an_engine_report_of_other_routers_work_is_charged() -> None:
    load = RankLoad()
    load.reported(Report(0.0, 1, 9, waiting_uncached_tokens=50_000))
    decision = policy().decide(Asked(1000), [candidate("loaded", 900, load=load), candidate("free")], 0.5)
    assert decision.chosen.candidate.worker == "free"


def test_cost_s_uses_the_ranks_own_speed_or_the_median_of_the_measured() -> None:
    fast, slow, unknown = RankLoad(), RankLoad(), RankLoad()
    fast.prefill_tokens_per_s, slow.prefill_tokens_per_s = 20_000.0, 10_000.0
    decision = policy().decide(
        Asked(1000), [candidate("f", load=fast), candidate("s", load=slow), candidate("u", load=unknown)], 0.0
    )
    by_name = {s.candidate.worker: s for s in decision.scored}
    assert by_name["f"].cost_s == pytest.approx(by_name["f"].terms.total / 20_000)
    assert by_name["u"].cost_s == pytest.approx(by_name["u"].terms.total / 15_000)


def test_reasons_name_the_special_situations() -> None:
    assert policy().decide(Asked(10), [candidate("a")], 0.0).reason == "only"
    assert policy().decide(Asked(10, ids_known=False), [candidate("a"), candidate("b")], 0.0).reason == "no_tokens"
    assert policy().decide(Asked(10, client_rank=1), [candidate("a"), candidate("b")], 0.0).reason == "client_rank"


def test_round_robin_visits_workers_before_their_further_ranks() -> None:
    rule = policy("round_robin")
    ranks = [candidate("a", rank=0), candidate("a", rank=1), candidate("b", rank=0), candidate("b", rank=1)]
    seen = [(s.worker, s.rank) for s in (rule.decide(Asked(9), ranks, 0.0).chosen.candidate for _ in range(4))]
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_least_inflight_and_overlap_do_what_their_names_say() -> None:
    ranks = [candidate("a", 100, load=busy(1, 3)), candidate("b", load=busy(1, 1))]
    assert policy("least_inflight").decide(Asked(200), ranks, 0.0).chosen.candidate.worker == "b"
    assert policy("overlap").decide(Asked(200), ranks, 0.0).chosen.candidate.worker == "a"


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
    decision = policy(name).decide(Asked(prompt), ranks, now)
    assert decision.chosen in decision.scored
    assert decision.reason in REASONS
    assert all(s.terms.total >= 0 and s.terms.total < float("inf") for s in decision.scored)
    assert len(decision.scored) == len(ranks)

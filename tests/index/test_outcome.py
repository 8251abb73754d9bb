"""The truth metric of one rank: when predictions are doubted, by how much, and when no longer."""

from __future__ import annotations

import pytest

from router.index.outcome import MAX_AGE_S, RECOVERED, WINDOW, OutcomeWatch


def answered(
    watch: OutcomeWatch,
    number: int,
    held: int,
    reported: int,
    *,
    hoped: int = 0,
    complete: bool = True,
    at_s: float = 0.0,
) -> bool:
    changed = False
    for _ in range(number):
        changed = watch.add(held, hoped, reported, complete=complete, now_s=at_s) or changed
    return changed


def test_an_engine_that_keeps_reporting_less_costs_the_rank_that_share_of_its_credit() -> None:
    """Case 34: removals that are never announced."""
    watch = OutcomeWatch()
    assert not answered(watch, WINDOW - 1, 1600, 400)
    assert (watch.verdict, watch.credit) == ("", 1.0)
    assert answered(watch, 1, 1600, 400)
    assert (watch.verdict, watch.credit) == ("over", 0.25)
    finding = watch.finding(3)
    assert finding is not None
    assert (finding.kind, finding.advertised, finding.observed) == ("outcome", 1600 * WINDOW, 400 * WINDOW)
    assert finding.advice.startswith("rank 3: of its last 16 requests")
    assert answered(watch, WINDOW, 1600, 0)
    assert watch.credit == 0.0


def test_credit_comes_back_when_predictions_are_right_again() -> None:
    watch = OutcomeWatch()
    answered(watch, WINDOW, 1600, 0)
    answered(watch, RECOVERED - 1, 1600, 1600)
    assert watch.finding(0) is not None
    assert answered(watch, 1, 1600, 1600)
    assert (watch.verdict, watch.credit, watch.finding(0)) == ("", 1.0, None)
    assert not answered(watch, RECOVERED - 1, 1600, 0), "a new verdict takes a window of its own"


def test_what_nobody_confirms_any_more_is_forgotten() -> None:
    """A rank without credit may get no request that could clear it."""
    watch = OutcomeWatch()
    answered(watch, WINDOW, 1600, 0)
    assert not watch.expire(MAX_AGE_S)
    assert watch.expire(MAX_AGE_S + 1)
    assert (watch.verdict, watch.credit) == ("", 1.0)


@pytest.mark.parametrize(
    ("held", "reported", "number"),
    [(1600, 1600, 100), (1600, 1300, 100), (0, 0, 100), (1600, 0, WINDOW // 2 - 1), (1000, 1600, 100)],
    ids=["exact", "a fifth evicted meanwhile", "nothing cached", "a burst of evictions", "two thirds foreseen"],
)
def test_ordinary_misses_are_no_verdict(held: int, reported: int, number: int) -> None:
    watch = OutcomeWatch()
    answered(watch, 20, 1600, 1600)
    answered(watch, number, held, reported)
    assert (watch.verdict, watch.credit) == ("", 1.0)


def test_reuse_that_was_never_predicted_is_said_where_the_history_is_complete() -> None:
    """The silent zero: stores apply, lookups miss."""
    watch = OutcomeWatch()
    answered(watch, 3 * WINDOW, 0, 1600, complete=False)
    assert watch.verdict == "", "a late joiner is still learning"
    assert answered(watch, 1, 0, 1600)
    assert (watch.verdict, watch.credit) == ("under", 1.0)
    finding = watch.finding(0)
    assert finding is not None
    assert "token ids" in finding.advice
    answered(watch, WINDOW, 1600, 1600)
    assert watch.finding(0) is None


def test_blocks_hoped_for_from_prompts_under_way_are_no_surprise() -> None:
    """Siblings of a burst, case 53."""
    watch = OutcomeWatch()
    answered(watch, 2 * WINDOW, 0, 1600, hoped=1600)
    assert watch.verdict == ""

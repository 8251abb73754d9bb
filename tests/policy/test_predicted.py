"""Predicted blocks: short-lived, bounded, dropped on failure (case 53)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.policy.predicted import EXPIRED_AT_ONCE, PredictedBlocks


def depth(predicted: PredictedBlocks, slot: int, keys: list[int], confirmed: int = 0) -> int:
    longer = dict(predicted.extend(keys, {slot: (0, confirmed)} if confirmed else {}))
    return longer.get(slot, confirmed)


def test_a_prediction_extends_the_confirmed_prefix_until_its_time_is_over() -> None:
    predicted = PredictedBlocks(ttl_s=10.0)
    predicted.add(3, [11, 12, 13], now_s=0.0)
    assert depth(predicted, 3, [11, 12, 13, 14]) == 3
    assert depth(predicted, 3, [11, 12]) == 2
    assert depth(predicted, 3, [10, 11, 12], confirmed=1) == 3, "a prediction goes on where events end"
    assert depth(predicted, 4, [11, 12]) == 0
    predicted.expire(10.0)
    assert depth(predicted, 3, [11, 12, 13]) == 0
    assert len(predicted) == 0


def test_a_failed_requests_blocks_are_dropped_at_once_but_not_its_siblings() -> None:
    predicted = PredictedBlocks(ttl_s=10.0)
    first, second = predicted.add(0, [1, 2], 0.0), predicted.add(0, [1, 3], 0.0)
    assert first is not None
    assert second is not None
    predicted.drop(first)
    assert depth(predicted, 0, [1, 2]) == 1
    predicted.drop(first)
    assert depth(predicted, 0, [1, 3]) == 2


def test_the_oldest_prediction_goes_when_the_bound_is_reached() -> None:
    predicted = PredictedBlocks(ttl_s=10.0, max_blocks=4)
    predicted.add(0, [1, 2, 3], 0.0)
    predicted.add(0, [7, 8], 0.0)
    assert depth(predicted, 0, [1]) == 0
    assert depth(predicted, 0, [7, 8]) == 2
    assert len(predicted) == 2


def test_many_long_prompts_that_are_over_at_once_are_forgotten_a_few_at_a_time() -> None:
    """Forgetting them all in one decision would hold up the loop for tens of milliseconds."""
    predicted = PredictedBlocks(ttl_s=10.0)
    long = EXPIRED_AT_ONCE // 2
    for number in range(5):
        predicted.add(0, range(number * long, (number + 1) * long), 0.0)
    left = []
    for _ in range(3):
        predicted.expire(11.0)
        left.append(len(predicted))
    assert left == [3 * long, long, 0]


def test_zero_ttl_predicts_nothing() -> None:
    assert PredictedBlocks(ttl_s=0.0).add(0, [1], 0.0) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 5), max_size=4), st.booleans()), max_size=60))
def test_nothing_is_left_once_everything_expired(steps: list[tuple[int, list[int], bool]]) -> None:
    predicted = PredictedBlocks(ttl_s=1.0, max_blocks=16)
    for now, (slot, keys, drop) in enumerate(steps):
        made = predicted.add(slot, keys, now_s=now / 10)
        if made is not None and drop:
            predicted.drop(made)
        assert len(predicted) <= 16
    predicted.expire(1e9)
    assert len(predicted) == 0
    assert not predicted._slots

"""Predicted blocks: short-lived, bounded, dropped on failure (case 53)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.policy.predicted import EXPIRED_AT_ONCE, PredictedBlocks, Prediction


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


_PARENTS = (None, 0, 1, 2, 3, 2, 5, 6, None, 8, 9, 8)
"""A forest: each number is a block that follows its parent."""


def chain(end: int) -> list[int]:
    above = _PARENTS[end]
    return [*chain(above), end] if above is not None else [end]


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 11), st.integers(0, 4), st.sampled_from(["keep", "drop", "later"])),
        max_size=40,
    )
)
def test_what_is_predicted_is_what_the_living_predictions_name(steps: list[tuple[int, int, int, str]]) -> None:
    """Prompts that share a beginning, begin at another confirmed depth, fail in any order and end in time."""
    predicted = PredictedBlocks(ttl_s=1.0)
    living: list[tuple[float, int, list[int], Prediction]] = []
    for number, (slot, end, confirmed, fate) in enumerate(steps):
        now_s = number / 10
        made = predicted.add(slot, chain(end)[confirmed:], now_s)
        if made is not None:
            living.append((now_s + 1.0, slot, chain(end)[confirmed:], made))
        if living and fate != "keep":
            predicted.drop(living.pop(-1 if fate == "drop" else 0)[3])
        predicted.expire(now_s)
        living = [one for one in living if one[0] > now_s]
        for asked_slot in (0, 1):
            named = {key for _, of, keys, _ in living if of == asked_slot for key in keys}
            for keys in map(chain, range(len(_PARENTS))):
                for start in range(len(keys)):
                    expected = next((at for at in range(start, len(keys)) if keys[at] not in named), len(keys))
                    assert depth(predicted, asked_slot, keys, start) == expected
        assert len(predicted) == sum(len(keys) for _, _, keys, _ in living)
        for key, run in ((key, run) for runs in predicted._slots.values() for key, run in runs.items()):
            assert key in run.keys
            assert len(run.keys) == max(run.named), "all of a run is named"


def test_a_conversation_that_grows_stays_one_run_and_a_turn_that_failed_leaves_the_turn_before() -> None:
    predicted = PredictedBlocks(ttl_s=10.0)
    turns = [predicted.add(0, list(range(blocks)), now_s) for now_s, blocks in enumerate((5, 13, 21, 30))]
    assert len({id(run) for run in predicted._slots[0].values()}) == 1
    last = turns.pop()
    assert last is not None
    predicted.drop(last)
    assert depth(predicted, 0, list(range(40))) == 21
    predicted.expire(11.5)  # the first two are over
    assert depth(predicted, 0, list(range(40))) == 21
    predicted.expire(12.5)
    assert not predicted._slots


def test_the_end_of_a_prompt_that_failed_is_not_kept_with_its_beginning() -> None:
    """A beginning that is predicted again and again would hold the ends of all that ever shared it, unbounded."""
    predicted = PredictedBlocks(ttl_s=10.0)
    long = predicted.add(1, list(range(1000)), 0.0)
    for depth_blocks in (700, 30, 2):
        predicted.add(1, list(range(depth_blocks)), 0.0)
    assert long is not None
    predicted.drop(long)
    assert depth(predicted, 1, list(range(1000))) == 700
    run = predicted._slots[1][0]
    blocks = 0
    while run is not None:
        blocks += len(run.keys)
        run = run.rest  # type: ignore[assignment]
    assert blocks == 700

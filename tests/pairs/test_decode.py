"""The choice of the decode rank."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pairs.decode import DecodeLoad, choose_decode


def choose(*loads: DecodeLoad, prompt: int = 1000, answer: int = 100) -> int:
    return choose_decode(list(enumerate(loads)), prompt, answer, random.Random(1)).chosen.target


IDLE = DecodeLoad(0, 0, 10_000, 10)


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([DecodeLoad(5000, 2, 10_000, 10), IDLE], 1),
        ([DecodeLoad(2000, 8, 10_000, 10), DecodeLoad(3000, 2, 10_000, 10)], 1),
        ([DecodeLoad(3000, 2, 10_000, 10), DecodeLoad(3000, 2, 40_000, 10)], 1),
        ([DecodeLoad(3000, 2, 10_000, 10), DecodeLoad(3000, 2, 10_000, 40)], 1),
        ([IDLE, DecodeLoad(0, 0, 10_000, 10, cached_tokens=800)], 1),
    ],
    ids=["less KV in use", "fewer requests outweigh some KV", "more capacity", "more slots", "holds the prefix"],
)
def test_the_rank_with_the_most_left_takes_the_prompt(loads: list[DecodeLoad], wanted: int) -> None:
    assert choose(*loads) == wanted


def test_a_held_prefix_does_not_outweigh_load() -> None:
    assert choose(DecodeLoad(4000, 5, 10_000, 10, cached_tokens=900), DecodeLoad(1000, 1, 10_000, 10)) == 1


def test_a_rank_with_room_beats_a_less_busy_one_without() -> None:
    full = DecodeLoad(9500, 0, 10_000, 100)
    assert choose(full, DecodeLoad(8000, 9, 10_000, 10)) == 1
    assert choose(full, DecodeLoad(9900, 9, 10_000, 10)) == 0, "nobody has room: the least loaded"


def test_of_a_long_answer_only_what_an_engine_reserves_must_fit() -> None:
    chosen = choose_decode([(0, DecodeLoad(8000, 0, 10_000))], 1000, 1_000_000, random.Random(1)).chosen
    assert chosen.fits


def test_exact_ties_are_broken_at_random() -> None:
    """Case 50."""
    rng = random.Random(3)
    seen = {choose_decode([(n, IDLE) for n in range(4)], 10, 10, rng).chosen.target for _ in range(60)}
    assert seen == {0, 1, 2, 3}


loads = st.builds(
    DecodeLoad,
    st.integers(0, 10**9),
    st.integers(0, 10**4),
    st.none() | st.integers(1, 10**9),
    st.none() | st.integers(1, 10**4),
    st.integers(0, 10**6),
)


@given(st.lists(loads, min_size=1, max_size=12), st.integers(0, 10**7), st.integers(0, 2**31))
def test_any_loads_give_one_of_the_cheapest_that_fit(given_loads: list[DecodeLoad], prompt: int, answer: int) -> None:
    """Case 61: odd numbers never raise, and all candidates are explained."""
    choice = choose_decode(list(enumerate(given_loads)), prompt, answer, random.Random(0))
    assert [scored.target for scored in choice.scored] == list(range(len(given_loads)))
    fitting = [scored for scored in choice.scored if scored.fits] or list(choice.scored)
    assert choice.chosen in choice.scored
    assert choice.chosen.cost == min(scored.cost for scored in fitting)

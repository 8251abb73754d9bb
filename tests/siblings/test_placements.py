"""What one router placed is predicted by the others as if they had placed it themselves; bounded, whoever says it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.hashing import Scheme
from router.policy.predicted import PredictedBlocks
from router.siblings.frames import MAX_BODY_BYTES, MAX_PLACED_KEYS, Frame, Placed, mac_key, opened, seal
from router.siblings.placements import FRAME_BYTES, Placements, packed, unpacked

W = "http://w:1"
PAGE = Scheme("sglang-sha256", 16)
TTL_S = 10.0


class Router:
    """Placements over its own predictions; it knows one rank, whose blocks are in slot 7."""

    def __init__(self, max_blocks: int = 500_000) -> None:
        self.predicted = PredictedBlocks(TTL_S, max_blocks)
        self.placements = Placements(
            self.predicted, lambda url, rank, scheme: 7 if (url, rank, scheme) == (W, 0, PAGE) else None
        )

    def depth(self, keys: list[int]) -> int:
        return dict(self.predicted.extend(keys, {})).get(7, 0)


def passed_on(placed: list[Placed]) -> list[Placed]:
    """As the others read it."""
    _, mac, body = seal(mac_key("k"), Frame(b"s" * 16, 1, 0.0, False, [], placed))
    frame = opened(mac_key("k"), mac, body)
    assert isinstance(frame, Frame)
    return frame.placed


def test_a_siblings_placement_is_predicted_until_our_own_time_to_live_is_over() -> None:
    """case 53"""
    here, there = Router(), Router()
    keys = [5, -6, 7]
    there.placements.made(W, 0, PAGE, keys)
    here.placements.take(passed_on(there.placements.told()), 100.0)
    assert here.depth([5, -6, 7, 8]) == 3
    assert there.placements.told() == [], "it is told once"
    here.predicted.expire(100.0 + TTL_S)
    assert here.depth(keys) == 0
    assert len(here.predicted) == 0


def test_what_was_heard_is_not_told_on() -> None:
    here, there = Router(), Router()
    there.placements.made(W, 0, PAGE, [1])
    here.placements.take(there.placements.told(), 0.0)
    assert here.placements.told() == []


@pytest.mark.parametrize(
    "placed",
    [
        Placed("http://elsewhere:1", 0, *PAGE, packed([1])),
        Placed(W, 1, *PAGE, packed([1])),
        Placed(W, 0, "sha3-of-a-later-version", 16, False, packed([1])),
        Placed(W, 0, PAGE.kind, 32, False, packed([1])),
        Placed(W, 0, PAGE.kind, 16, True, packed([1])),
        Placed(W, 0, *PAGE, b""),
        Placed(W, 0, *PAGE, b"no key"),
    ],
    ids=["worker", "rank", "kind", "width", "bigram", "no keys", "less than a key"],
)
def test_what_means_nothing_here_is_passed_over(placed: Placed) -> None:
    here = Router()
    here.placements.take(passed_on([placed, Placed(W, 0, *PAGE, packed([2]))]), 0.0)
    assert len(here.predicted) == 1
    assert here.depth([2]) == 1


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=40), st.binary(max_size=7))
def test_keys_are_the_same_on_the_other_side(keys: list[int], torn: bytes) -> None:
    assert list(unpacked(packed(keys) + torn)) == keys


def test_of_a_long_prompt_the_first_blocks_are_told() -> None:
    here, there = Router(), Router()
    keys = list(range(8192))
    there.placements.made(W, 0, PAGE, keys)
    here.placements.take(passed_on(there.placements.told()), 0.0)
    assert here.depth(keys) == MAX_PLACED_KEYS


@pytest.mark.parametrize("blocks", [1, 100, 8192])
def test_what_nobody_collects_or_takes_away_stays_bounded(blocks: int) -> None:
    there, here = Router(), Router(max_blocks=2000)
    keys = list(range(blocks))
    for _ in range(20_000):
        there.placements.made(W, 0, PAGE, keys)
    placed = there.placements.told()
    _, _, body = seal(mac_key("k"), Frame(b"s" * 16, 1, 0.0, False, [], placed))
    assert 0.4 * FRAME_BYTES < len(body) < 1.02 * FRAME_BYTES < MAX_BODY_BYTES
    there.placements.made(W, 0, PAGE, keys)
    assert len(there.placements.told()) == 1, "the next frame has room again"
    here.placements.take(passed_on(placed), 0.0)
    assert 0 < len(here.predicted) <= 2000

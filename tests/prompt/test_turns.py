"""Turns for other threads."""

from __future__ import annotations

import pytest

from router.prompt.turns import AT_ONCE, in_turns


@pytest.mark.parametrize("count", [0, 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE])
def test_all_items_come_once_and_in_order(count: int) -> None:
    assert list(in_turns(range(count))) == list(range(count))
    assert list(in_turns(dict.fromkeys(range(count)).keys())) == list(range(count))

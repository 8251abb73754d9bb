from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.hashing import pack_ids
from router.prompt.verify import AGREEMENTS, COUNT_FAULTS, MAX_SETS, Difference, Verification, difference

PLAIN: frozenset[str] = frozenset()
TOOLS = frozenset({"tools"})
BOTH = frozenset({"tools", "parts"})
WHERE = "rendering"


def seen(features: frozenset[str] = TOOLS) -> Difference:
    found = difference(pack_ids([1, 2, 3]), pack_ids([1, 9, 3]), features)
    assert found is not None
    return found


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=30))
def test_the_first_differing_token_is_found(ours: list[int], theirs: list[int]) -> None:
    found = difference(pack_ids(ours), pack_ids(theirs), PLAIN)
    if ours == theirs:
        assert found is None
        return
    at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    assert found is not None
    assert (found.at, found.ours, found.theirs) == (at, tuple(ours[at : at + 8]), tuple(theirs[at : at + 8]))
    assert found.before == tuple(ours[max(0, at - 8) : at])
    assert f"token {at}" in str(found)


def test_a_set_is_verified_by_agreements_and_by_nothing_else() -> None:
    checks = Verification(every=1000)
    for _ in range(AGREEMENTS):
        assert checks.standing(WHERE, TOOLS) == "unverified"
        assert checks.due(WHERE, TOOLS)
        checks.agreed(WHERE, TOOLS)
    assert checks.standing(WHERE, TOOLS) == "verified"
    assert checks.standing(WHERE, PLAIN) == "unverified"
    assert checks.standing("another release", TOOLS) == "unverified"


def test_one_comparison_at_a_time_and_then_rarely() -> None:
    checks = Verification(every=10)
    assert checks.due(WHERE, PLAIN)
    assert not checks.due(WHERE, PLAIN)
    checks.unanswered(WHERE, PLAIN)
    for _ in range(AGREEMENTS):
        assert checks.due(WHERE, PLAIN)
        checks.agreed(WHERE, PLAIN)
    due = [checks.due(WHERE, PLAIN) for _ in range(10)]
    assert due == [False] * 9 + [True]


def test_zero_never_compares() -> None:
    assert not Verification(every=0).due(WHERE, PLAIN)


def test_a_difference_turns_off_the_set_and_all_that_contain_it() -> None:
    checks = Verification(every=10)
    assert checks.differed(WHERE, seen())
    assert not checks.differed(WHERE, seen()), "no news the second time"
    assert [checks.standing(WHERE, f) for f in (TOOLS, BOTH, PLAIN)] == ["drifted", "drifted", "unverified"]
    assert checks.standing("another release", TOOLS) == "unverified"
    assert checks.first_difference(WHERE) == seen()
    assert checks.describe(WHERE)[0]["standing"] == "drifted"


def test_a_verified_set_drifts_too() -> None:
    checks = Verification(every=10)
    for _ in range(AGREEMENTS):
        checks.agreed(WHERE, TOOLS)
    checks.differed(WHERE, seen())
    assert checks.standing(WHERE, TOOLS) == "drifted"


def test_a_wrong_count_asks_for_a_comparison_and_drifts_when_nobody_compares() -> None:
    checks = Verification(every=1000)
    for _ in range(AGREEMENTS):
        checks.agreed(WHERE, PLAIN)
    assert not checks.counted(WHERE, PLAIN, 10, 10)
    assert not checks.due(WHERE, PLAIN)
    assert not checks.counted(WHERE, PLAIN, 10, 11)
    assert checks.due(WHERE, PLAIN), "the next prompt is compared"
    checks.agreed(WHERE, PLAIN)
    faults = [checks.counted(WHERE, PLAIN, 10, 11) for _ in range(COUNT_FAULTS)]
    assert faults == [False] * (COUNT_FAULTS - 1) + [True]
    assert checks.standing(WHERE, PLAIN) == "drifted"
    assert "counted 11" in str(checks.first_difference(WHERE))


def test_right_counts_in_between_forgive() -> None:
    checks = Verification(every=0)
    for _ in range(10):
        assert not checks.counted(WHERE, PLAIN, 10, 11)
        assert not checks.counted(WHERE, PLAIN, 10, 10)
    assert checks.standing(WHERE, PLAIN) == "unverified"


def test_what_is_remembered_is_bounded() -> None:
    checks = Verification(every=10)
    for number in range(MAX_SETS + 50):
        checks.due(WHERE, frozenset({str(number)}))
    assert len(checks.describe(WHERE)) == MAX_SETS
    for number in range(200):
        checks.due(number, PLAIN)
    assert checks.describe(WHERE) == []
    assert checks.standing(199, PLAIN) == "unverified"


def test_an_engine_that_does_not_answer_is_asked_less_and_less() -> None:
    known = Verification(every=100)
    asked = []
    for number in range(1000):
        if known.due(WHERE, PLAIN):
            asked.append(number)
            known.unanswered(WHERE, PLAIN)
    gaps = [after - before for before, after in pairwise(asked)]
    assert gaps[:6] == [2, 4, 8, 16, 32, 64]
    assert set(gaps[6:]) == {100}
    while not known.due(WHERE, PLAIN):
        pass
    known.agreed(WHERE, PLAIN)
    assert known.due(WHERE, PLAIN), "it answers again"

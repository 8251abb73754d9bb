"""Transcripts of the sequence tracker: two publishers behind one endpoint (cases 16, 18; sglang#22983)."""

from __future__ import annotations

import itertools

import pytest

from router.stream.actions import AskReplay, Rejected, Restarted
from router.stream.interleave import FORGIVEN_AFTER
from router.stream.replay import END_SEQ
from tests.stream.script import LIMITS, Script, joined

CALM_S = LIMITS.duplicate_calm_s


def doubled(*, replay: bool = False, upto: int = 60) -> Script:
    """A at 51 and on, B at 10 and on, turn by turn, until both are recognised."""
    script = joined(replay=replay, upto=50)
    for turn in range(upto - 50):
        script.live(51 + turn, process="a")
        script.live(10 + turn, process="b")
        script.wait(0.1)
    assert script.tracker.state == "duplicated"
    return script


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("first", [9, 30, 51, 52, 90, 5000])
@pytest.mark.parametrize("burst", [1, 2, 7])
@pytest.mark.parametrize("pause_s", [0.01, 100.0])
def test_two_sequences_that_interleave_are_two_publishers_and_neither_is_believed(
    replay: bool, first: int, burst: int, pause_s: float
) -> None:
    """Whatever their distance and their pace; and not as an endless series of restarts."""
    script = joined(replay=replay, upto=50)
    restarts = 0
    for turn in range(12):
        for seq in range(burst):
            script.live(51 + turn * burst + seq, process="a")
        for seq in range(burst):
            script.live(first + turn * burst + seq, process="b")
        script.wait(pause_s)
        if turn == 5:
            restarts = script.count(Restarted)
    assert (script.tracker.state, script.run()) == ("duplicated", [])
    assert (script.tracker.last_seq, script.tracker.history) == (None, "partial")
    assert "two publishers speak for tcp://h:1" in script.tracker.reason
    assert script.count(Restarted) == restarts <= 4
    assert script.count(AskReplay) <= 6


def test_two_publishers_that_number_alike_are_recognised_by_their_contents() -> None:
    """Context-parallel ranks publish the same events under the same numbers, with clocks of their own."""
    script = joined(replay=False, upto=50)
    for seq in range(51, 60):
        script.live(seq, process="a")
        script.live(seq, process="b")
    assert script.tracker.state == "duplicated"


def test_batches_that_are_alike_to_the_byte_count_once() -> None:
    """Two publishers that cannot be told apart do no harm: each batch is applied once (case 23)."""
    script = joined(replay=False, upto=50)
    for seq in range(51, 60):
        script.live(seq, seq)
    assert (script.tracker.state, script.seqs()) == ("live", list(range(60)))


@pytest.mark.parametrize("replay", [True, False])
def test_when_one_publisher_is_gone_the_other_is_believed_again(replay: bool) -> None:
    script = doubled(replay=replay)
    script.wait(CALM_S)
    script.live(20, 21, 22, process="b")
    assert script.tracker.state == "duplicated"
    script.live(23, 24, 25, process="b")
    if replay:
        assert script.tracker.state == "replaying"
        script.answer(*range(26), process="b")
        assert (script.run(), script.tracker.history) == ([(seq, "b") for seq in range(26)], "complete")
    else:
        assert (script.run(), script.tracker.history) == ([(23, "b"), (24, "b"), (25, "b")], "partial")
    assert script.tracker.state == "live"


def test_a_second_time_one_turn_is_enough() -> None:
    script = doubled()
    script.wait(CALM_S)
    script.live(*range(20, 26), process="b")
    assert script.tracker.state == "live"
    script.live(61, process="a")
    script.live(26, process="b")
    assert script.tracker.state == "duplicated"


def test_batches_are_not_applied_while_two_speak_however_long_that_is() -> None:
    script = doubled()
    for turn in range(200):
        script.live(61 + turn, process="a")
        script.live(20 + turn, process="b")
        script.wait(1.0)
    assert (script.tracker.state, script.run()) == ("duplicated", [])


def test_the_end_mark_of_one_of_them_lets_the_other_begin_anew() -> None:
    script = doubled()
    script.live(END_SEQ)
    assert script.tracker.state == "connecting"
    script.live(20, 21, process="b")
    assert (script.tracker.state, script.run()) == ("live", [(20, "b"), (21, "b")])


@pytest.mark.parametrize("replay", [True, False])
def test_a_new_connection_is_looked_at_anew(replay: bool) -> None:
    script = doubled(replay=replay)
    script.disconnect()
    assert script.tracker.state == "connecting"
    script.connect()
    script.live(0, 1, process="c")
    assert script.run() == [(0, "c"), (1, "c")]
    assert (script.tracker.state, script.tracker.history) == ("live", "complete")


def test_an_engine_that_restarts_again_and_again_is_no_pair_of_publishers() -> None:
    """Case 18, ten times: over new connections, and from 0 over the same one (behind a proxy that keeps it)."""
    script = joined(replay=False, upto=5)
    for number, process in enumerate("bcdefghijk"):
        if number % 2:
            script.disconnect()
            script.connect()
        first = 0 if number % 2 == 0 else 3
        script.live(*range(first, 9), process=process)
        assert (script.tracker.state, script.run()[-1]) == ("live", (8, process))


def test_restarts_far_apart_are_restarts_wherever_they_are_first_heard() -> None:
    script = joined(replay=False, upto=5)
    for process, first in zip("bcdef", itertools.cycle([4, 5]), strict=False):
        script.live(*range(first, first + FORGIVEN_AFTER + 2), process=process)
        assert script.tracker.state == "live"


def test_a_replay_socket_of_another_publisher_does_not_restart_the_rank_for_ever() -> None:
    script = Script()
    for turn in range(6):
        script.live(40 + turn, process="a")
        script.answer(*range(30, 60), process="b")
    assert script.tracker.state == "duplicated"
    assert "replay answers for another one" in script.tracker.reason
    assert script.count(Restarted) <= 4


# -------------------------------------------------------------------- what is out of order and no second publisher


def test_a_batch_that_overtook_another_is_no_restart() -> None:
    """No TCP connection does this, a relay might: the late one fills the hole it left."""
    script = joined()
    script.live(7, 6, 8)
    assert (script.tracker.state, script.count(Restarted)) == ("gapped", 0)
    script.answer(6, 7, 8)
    assert (script.tracker.state, script.seqs()) == ("live", list(range(9)))


def test_a_batch_that_comes_after_it_was_given_up_is_dropped() -> None:
    """Case 22: what was removed after it must not come back."""
    script = joined(replay=False)
    script.live(8, 6, 7, 9)
    assert (script.tracker.state, script.seqs(), script.count(Restarted)) == ("live", [8, 9], 0)
    assert [action.why for action in script.out if isinstance(action, Rejected)] == ["late", "late"]


def test_numbers_far_back_in_a_hole_are_not_late_but_another_process() -> None:
    script = joined(replay=False)
    script.live(5_000_000, 900, 901)
    assert script.run() == [(900, "a"), (901, "a")]

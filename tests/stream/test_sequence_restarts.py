"""Transcripts of the sequence tracker: other processes behind the endpoint, and lost connections."""

from __future__ import annotations

import pytest

from router.stream.actions import (
    AskReplay,
    Gap,
    Rejected,
    Reset,
    Restarted,
    StateChanged,
)
from router.stream.replay import END_SEQ
from tests.stream.script import LIMITS, Script, joined

# -------------------------------------------------------------------- restarts (cases 8, 18)


def test_a_sequence_that_goes_back_to_zero_is_another_process() -> None:
    """Case 18: … 41, 42, then 0 with a new block."""
    script = joined(upto=42)
    script.live(0, 1, process="b")
    assert script.run() == [(0, "b"), (1, "b")]
    assert (script.count(Restarted), script.tracker.history) == (1, "complete")
    assert "went back from" not in script.tracker.reason


def test_a_sequence_that_goes_back_to_a_later_number_asks_replay_from_zero() -> None:
    script = joined(replay=False, upto=42)
    script.live(9, process="b")
    assert (script.run(), script.tracker.history) == ([(9, "b")], "partial")
    script = joined(upto=42)
    script.live(43)
    script.live(9, process="b")
    assert (script.ask.start, script.tracker.state) == (0, "replaying")
    script.answer(*range(10), process="b")
    assert script.run() == [(seq, "b") for seq in range(10)]


def test_a_batch_delivered_twice_is_ignored_whole() -> None:
    """Case 23: the same BATCH twice."""
    script = joined(replay=False)
    script.live(5, 4, 6, 6)
    assert script.seqs() == [0, 1, 2, 3, 4, 5, 6]
    assert [action.why for action in script.out if isinstance(action, Rejected)] == ["duplicate"] * 3
    assert script.count(Restarted) == 0


def test_the_same_number_with_another_content_is_another_process() -> None:
    script = joined(replay=False)
    script.live(5, process="b")
    assert script.run() == [(5, "b")]
    assert script.count(Restarted) == 1


def test_two_publishers_behind_one_endpoint_are_never_mixed_nor_asked_for_replay_at_every_turn() -> None:
    """Case 16: two publishers per rank (sglang#22983)."""
    script = joined(upto=50)
    for turn in range(20):
        script.live(51 + turn, process="a")
        script.live(10 + turn, process="b")
        assert len({process for _, process in script.run()}) <= 1
        script.wait(0.1)
    assert script.count(AskReplay) <= 4


def test_a_restart_while_a_hole_is_asked_for_drops_what_waited() -> None:
    script = joined()
    script.live(6, 9, 10)
    old = script.ask.ask
    script.live(1, 2, process="b")
    script.answer(7, 8, 9, 10, ask=old)
    assert script.run() == []
    script.answer(0, 1, 2, process="b")
    assert script.run() == [(0, "b"), (1, "b"), (2, "b")]
    assert script.tracker.state == "live"


def test_the_end_mark_voids_what_was_held_and_zero_begins_a_new_stream() -> None:
    """Case 8: not a 2^64 gap, not a decode error."""
    script = joined()
    script.live(END_SEQ)
    assert script.seqs() == []
    assert (script.tracker.state, script.count(Reset), script.count(Gap)) == ("connecting", 1, 0)
    script.live(0, 1, process="b")
    assert script.run() == [(0, "b"), (1, "b")]
    assert (script.tracker.state, script.tracker.history) == ("live", "complete")


def test_an_end_mark_on_a_fresh_stream_resets_nothing() -> None:
    script = Script(replay=False)
    script.live(END_SEQ, 0)
    assert (script.count(Reset), script.seqs()) == (0, [0])


# -------------------------------------------------------------------- connections


def test_a_lost_connection_costs_the_trust_at_once_and_is_unreachable_after_a_while() -> None:
    script = joined()
    script.disconnect()
    assert script.tracker.state == "connecting"
    script.wait(LIMITS.unreachable_after_s - 0.1)
    assert script.tracker.state == "connecting"
    script.wait(0.1)
    assert script.tracker.state == "unreachable"
    assert "tcp://h:1" in script.tracker.reason
    assert script.tracker.deadline_s is None
    script.connect()
    assert script.tracker.state == "replaying"


def test_a_reconnect_proves_by_the_last_batch_that_the_process_is_the_same() -> None:
    script = joined()
    script.disconnect()
    script.connect()
    assert script.ask.start == 5
    script.live(9)
    script.answer(5, 6, 7, 8, 9)
    assert script.seqs() == list(range(10))
    assert (script.tracker.state, script.count(Reset)) == ("live", 0)


def test_a_restart_hidden_behind_a_reconnect_is_seen_by_another_last_batch() -> None:
    script = joined()
    script.disconnect()
    script.connect()
    script.live(12, process="b")
    script.answer(*range(5, 13), process="b", end=False)
    assert (script.ask.start, script.count(Restarted)) == (0, 1)
    script.answer(*range(13), process="b")
    assert script.run() == [(seq, "b") for seq in range(13)]
    assert script.tracker.history == "complete"


def test_a_restart_hidden_behind_a_reconnect_is_seen_by_a_replay_that_lacks_the_last_batch() -> None:
    script = joined()
    script.disconnect()
    script.connect()
    script.answer()
    assert (script.ask.start, script.count(Restarted)) == (0, 1)
    script.answer(0, 1, process="b")
    assert script.run() == [(0, "b"), (1, "b")]


def test_a_replay_that_no_longer_reaches_the_last_batch_proves_nothing() -> None:
    script = joined()
    script.disconnect()
    script.connect()
    script.answer(8, 9)
    assert (script.seqs(), script.tracker.history, script.lost()) == ([8, 9], "partial", 2)
    assert script.tracker.state == "live"


@pytest.mark.parametrize("replay", [True, False])
def test_a_forward_jump_over_a_reconnect_without_evidence_may_hide_a_restart(replay: bool) -> None:
    script = joined(replay=replay)
    script.disconnect()
    script.connect()
    for _ in range(LIMITS.replay_stalls if replay else 0):
        script.wait(LIMITS.replay_quiet_s)
    assert script.tracker.state == "connecting"
    script.live(8)
    assert (script.seqs(), script.tracker.history, script.tracker.state) == ([8], "partial", "live")
    assert "another process" in script.tracker.reason
    assert (script.count(Gap), script.lost()) == (1, 2)


@pytest.mark.parametrize("replay", [True, False])
def test_a_reconnect_that_goes_on_with_the_very_next_number_keeps_what_is_held(replay: bool) -> None:
    script = joined(replay=replay)
    script.disconnect()
    script.connect()
    for _ in range(LIMITS.replay_stalls if replay else 0):
        script.wait(LIMITS.replay_quiet_s)
    script.live(6)
    assert (script.seqs(), script.count(Reset), script.tracker.state) == ([0, 1, 2, 3, 4, 5, 6], 0, "live")


def test_messages_still_queued_from_a_lost_connection_count_when_in_order_only() -> None:
    script = joined()
    script.disconnect()
    script.live(6, 9)
    assert script.seqs() == [0, 1, 2, 3, 4, 5, 6]
    assert (script.tracker.state, script.count(Gap)) == ("connecting", 0)


def test_a_reconnect_during_a_replay_drops_what_waited_and_asks_again() -> None:
    script = joined()
    script.live(8)
    old = script.ask.ask
    script.disconnect()
    script.connect()
    script.answer(6, 7, 8, ask=old)
    assert script.seqs() == [0, 1, 2, 3, 4, 5]
    script.answer(5, 6, 7, 8)
    assert script.seqs() == list(range(9))
    assert script.tracker.state == "live"


def test_replay_and_live_batches_of_two_processes_are_never_mixed() -> None:
    script = Script()
    script.live(4, 5)
    script.answer(2, 3, 4, process="b", end=False)
    assert script.run() == []
    assert (script.ask.start, script.count(Restarted)) == (0, 1)
    script.answer(0, 1, 2, process="b")
    assert script.run() == [(0, "b"), (1, "b"), (2, "b")]


def test_every_state_has_a_reason_and_no_change_is_told_twice() -> None:
    script = joined()
    script.live(7)
    script.answer(6, 7)
    script.disconnect()
    script.wait(10)
    script.wait(10)
    told = [(action.state, action.reason) for action in script.out if isinstance(action, StateChanged)]
    assert [state for state, _ in told] == ["replaying", "live", "gapped", "live", "connecting", "unreachable"]
    assert all(reason for _, reason in told)

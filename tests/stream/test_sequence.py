"""Transcripts of the sequence tracker: this comes in, that goes out. Joining a stream, and holes in it."""

from __future__ import annotations

import pytest

from router.stream.actions import (
    Apply,
    AskReplay,
    CancelReplay,
    Gap,
    Rejected,
    Reset,
    Restarted,
)
from router.stream.replay import END_SEQ
from router.stream.sequence import SequenceTracker
from tests.stream.script import LIMITS, Script, joined

# -------------------------------------------------------------------- start


def test_connecting_asks_replay_from_zero_at_once() -> None:
    script = Script(connect=False)
    assert script.tracker.state == "connecting"
    script.connect()
    assert script.ask.start == 0
    assert script.tracker.state == "replaying"


def test_live_batches_wait_in_order_until_replay_has_caught_up() -> None:
    script = Script()
    script.live(3, 4, 5)
    assert script.seqs() == []
    script.answer(0, 1, 2, end=False)
    assert script.seqs() == [0, 1, 2]
    script.answer(3, end=False)
    assert script.seqs() == [0, 1, 2, 3, 4, 5]
    assert (script.tracker.state, script.tracker.history) == ("live", "complete")
    assert script.out.count(CancelReplay(script.ask.ask)) == 1


def test_a_replay_buffer_that_begins_later_makes_history_partial() -> None:
    """The recorded short buffer (9..12 of 0..12): a start older than the buffer silently begins later."""
    script = Script()
    script.answer(9, 10, 11, 12)
    assert script.seqs() == [9, 10, 11, 12]
    assert (script.tracker.state, script.tracker.history) == ("live", "partial")
    assert script.outcomes() == ["partial"]


def test_a_replay_that_begins_at_one_is_complete_because_zero_is_always_the_clear_of_construction() -> None:
    script = Script()
    script.answer(1, 2)
    assert (script.seqs(), script.tracker.history) == ([1, 2], "complete")


def test_a_first_live_batch_zero_needs_no_replay() -> None:
    script = Script()
    script.live(0)
    assert (script.seqs(), script.tracker.state, script.tracker.history) == ([0], "live", "complete")
    script.answer(0, 1)  # of the cancelled ask
    assert script.seqs() == [0]


def test_a_first_live_batch_one_waits_for_replay_and_is_complete_without_it() -> None:
    script = Script()
    script.live(1)
    script.answer(0, 1)
    assert (script.seqs(), script.tracker.history) == ([0, 1], "complete")
    script = Script()
    script.live(1)
    for _ in range(LIMITS.replay_stalls):
        script.wait(LIMITS.replay_quiet_s)
    assert (script.seqs(), script.tracker.history) == ([1], "complete")


@pytest.mark.parametrize(("first", "history"), [(0, "complete"), (1, "complete"), (2, "partial"), (900, "partial")])
def test_without_a_replay_socket_the_first_live_number_decides_the_history(first: int, history: str) -> None:
    script = Script(replay=False)
    assert script.tracker.state == "live"
    script.live(first, first + 1)
    assert (script.seqs(), script.tracker.history) == ([first, first + 1], history)
    assert script.count(Reset) == 0


def test_a_replay_socket_that_never_answers_delays_the_join_and_no_more() -> None:
    script = Script()
    script.live(7, 8)
    for _ in range(LIMITS.replay_stalls):
        assert script.seqs() == []
        script.wait(LIMITS.replay_quiet_s)
    assert (script.seqs(), script.tracker.state, script.tracker.history) == ([7, 8], "live", "partial")
    assert script.outcomes() == ["timeout"]


def test_an_engine_that_has_published_nothing_is_live_and_its_first_batch_is_complete() -> None:
    script = Script()
    script.answer()
    assert (script.tracker.state, script.outcomes()) == ("live", ["empty"])
    script.live(0)
    assert (script.seqs(), script.tracker.history) == ([0], "complete")


def test_a_first_live_batch_after_an_empty_replay_asks_again() -> None:
    script = Script()
    script.answer()
    script.live(3)
    assert script.seqs() == []
    script.answer(0, 1, 2, 3)
    assert (script.seqs(), script.tracker.history) == ([0, 1, 2, 3], "complete")


def test_replay_that_ran_ahead_of_the_live_queue_is_not_a_restart() -> None:
    script = Script()
    script.answer(*range(200))
    script.live(*range(3, 201))
    assert script.seqs() == list(range(201))
    assert script.count(Restarted) == 0
    assert script.count(Rejected) == 0


# -------------------------------------------------------------------- gaps (cases 20, 21, 22)


def test_a_hole_is_asked_for_and_filled_in_order() -> None:
    """Case 20: 5 → 7."""
    script = joined()
    script.live(7, 8)
    assert script.tracker.state == "gapped"
    assert "batch 6 " in script.tracker.reason
    assert script.ask.start == 6
    script.answer(6, 7, 8)
    assert script.seqs() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert (script.tracker.state, script.tracker.history) == ("live", "complete")
    assert (script.count(Gap), script.lost(), script.count(Reset)) == (1, 0, 0)
    assert script.outcomes()[-1] == "filled"


def test_a_hole_in_the_replay_itself_is_asked_for_again_from_the_hole() -> None:
    """Case 21: the ROUTER's high-water mark drops silently."""
    script = joined()
    script.live(20)
    script.answer(*range(6, 10), *range(14, 18))
    assert script.ask.start == 10
    script.answer(10, 11, end=False)
    script.wait(LIMITS.replay_quiet_s)  # and no end mark
    assert script.ask.start == 12
    script.answer(*range(12, 21))
    assert script.seqs() == list(range(21))
    assert (script.count(Gap), script.count(Reset)) == (1, 0)


def test_a_number_that_no_replay_has_costs_what_was_held_before_it() -> None:
    """Case 21: SGLang burned 6 (it counts before it encodes); nobody will ever have it."""
    script = joined()
    script.live(7)
    for _ in range(LIMITS.replay_stalls):
        script.answer(7)
    script.live(8)
    assert script.seqs() == [7, 8]
    assert (script.tracker.state, script.tracker.history) == ("live", "partial")
    assert (script.count(Gap), script.lost(), script.outcomes()[-1]) == (1, 1, "unfilled")


def test_without_a_replay_socket_a_hole_costs_what_was_held_before_it_at_once() -> None:
    """Case 20."""
    script = joined(replay=False)
    script.live(9)
    assert script.seqs() == [9]
    assert (script.tracker.state, script.tracker.history) == ("live", "partial")
    assert (script.count(Gap), script.lost()) == (1, 3)
    assert "no replay socket" in script.tracker.reason


@pytest.mark.parametrize("replay", [True, False])
def test_a_huge_gap_costs_no_more_than_a_small_one(replay: bool) -> None:
    """Case 20: 5 → 5,000,000, and the largest number there is."""
    for far in (5_000_000, END_SEQ - 1):
        script = joined(replay=replay)
        script.live(far)
        for _ in range(LIMITS.replay_stalls):
            script.answer(far)
        assert script.seqs() == [far]
        assert script.lost() == far - 6
        assert len(script.out) < 30


def test_late_answers_change_nothing() -> None:
    """Case 22: the hole stored A, the live boundary removed it, replay timed out and answers later."""
    script = joined()
    script.live(7)
    asks = []
    for _ in range(LIMITS.replay_stalls):
        asks.append(script.ask.ask)
        script.wait(LIMITS.replay_quiet_s)
    script.live(8)
    assert script.seqs() == [7, 8]
    before = len(script.out)
    for ask in asks:
        script.answer(6, 7, 8, ask=ask)
    assert len(script.out) == before


def test_a_replay_socket_that_never_answered_is_left_alone_for_a_while() -> None:
    """Case 21: cooldown after failures only."""
    script = joined()
    script.live(7)
    for _ in range(LIMITS.replay_stalls):
        script.wait(LIMITS.replay_quiet_s)
    asks = script.count(AskReplay)
    script.live(9)
    assert (script.seqs(), script.count(AskReplay)) == ([9], asks)
    script.wait(LIMITS.replay_cooldown_s)
    script.live(11)
    assert script.count(AskReplay) == asks + 1
    script.answer(10, 11)
    assert script.seqs() == [9, 10, 11]


def test_a_replay_that_drips_for_ever_is_given_up_in_the_end() -> None:
    script = joined()
    script.live(1000)
    seq = 6
    while script.tracker.state == "gapped":
        assert seq < 100
        script.answer(seq, end=False)
        seq += 1
        script.wait(LIMITS.replay_quiet_s)
    assert script.seqs() == [1000]


@pytest.mark.parametrize("payload_bytes", [10, 400])
def test_waiting_batches_are_bounded_by_count_and_by_bytes(payload_bytes: int) -> None:
    script = joined()
    for seq in range(7, 200):
        script.out += script.tracker.live(seq, bytes(payload_bytes), script.now_s)
        if script.tracker.state != "gapped" or script.tracker.backlog:
            break
    assert seq - 6 <= LIMITS.held_batches + 1
    assert (seq - 6) * payload_bytes <= LIMITS.held_bytes + payload_bytes
    out = list(script.tracker.drain(1000, script.now_s))
    assert [action.seq for action in out if isinstance(action, Apply)] == list(range(7, seq + 1))
    assert script.tracker.state == "live"
    assert script.count(Reset) == 1


def test_several_holes_that_cannot_be_filled_are_paid_for_once() -> None:
    script = joined()
    script.live(7, 9, 10, 12, 13)
    for _ in range(LIMITS.replay_stalls):
        script.answer(7, 9, 10, 12, 13)
    assert script.seqs() == [12, 13]
    assert (script.lost(), script.count(Reset), script.tracker.state) == (3, 1, "live")


def test_a_backlog_is_handed_out_in_slices() -> None:
    """Case 31."""
    tracker = SequenceTracker("tcp://h:1", replay=True, now_s=0.0)
    (_, ask) = tracker.connected(0.0)
    assert isinstance(ask, AskReplay)
    for seq in range(100, 1100):
        tracker.live(seq, b"x", 0.0)
    for seq in range(99, 101):
        tracker.replay_batch(ask.ask, seq, b"x", 0.0)
    slices = 0
    while tracker.backlog:
        assert tracker.state == "replaying"
        assert sum(isinstance(action, Apply) for action in tracker.drain(64, 0.0)) <= 64
        slices += 1
    assert slices == -(-999 // 64)
    assert (tracker.state, tracker.last_seq) == ("live", 1099)

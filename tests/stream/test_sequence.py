"""Transcripts of the sequence tracker: this comes in, that goes out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from router.stream.actions import (
    Action,
    Apply,
    AskReplay,
    CancelReplay,
    Gap,
    Lost,
    Rejected,
    Replayed,
    Reset,
    Restarted,
    StateChanged,
)
from router.stream.replay import END_SEQ, StreamLimits
from router.stream.sequence import SequenceTracker

LIMITS = StreamLimits(held_batches=50, held_bytes=10_000)


def body(seq: int, process: str = "a") -> bytes:
    return f"{process}:{seq}".encode()


class Script:
    """A tracker, a clock, and what came out."""

    def __init__(self, *, replay: bool = True, connect: bool = True) -> None:
        self.now_s = 100.0
        self.tracker = SequenceTracker("tcp://h:1", replay=replay, now_s=self.now_s, limits=LIMITS)
        self.out: list[Action] = []
        self.ask = AskReplay(-1, -1)
        if connect:
            self.connect()

    def _took(self, actions: Sequence[Action]) -> None:
        self.out += actions
        for _ in range(1000):
            if not self.tracker.backlog:
                break
            self.out += self.tracker.drain(7, self.now_s)
        assert not self.tracker.backlog
        for action in self.out:
            if isinstance(action, AskReplay) and action.ask > self.ask.ask:
                self.ask = action

    def connect(self) -> None:
        self._took(self.tracker.connected(self.now_s))

    def disconnect(self) -> None:
        self._took(self.tracker.disconnected("the connection was lost", self.now_s))

    def live(self, *seqs: int, process: str = "a") -> None:
        for seq in seqs:
            self._took(self.tracker.live(seq, body(seq, process), self.now_s))

    def answer(self, *seqs: int, process: str = "a", end: bool = True, ask: int | None = None) -> None:
        ask = self.ask.ask if ask is None else ask
        for seq in seqs:
            self._took(self.tracker.replay_batch(ask, seq, body(seq, process), self.now_s))
        if end:
            self._took(self.tracker.replay_batch(ask, END_SEQ, b"", self.now_s))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self._took(self.tracker.tick(self.now_s))

    def run(self) -> list[tuple[int, str]]:
        """(seq, process) applied since the last reset."""
        found: list[tuple[int, str]] = []
        for action in self.out:
            if isinstance(action, Reset):
                found = []
            elif isinstance(action, Apply):
                process, _, seq = action.payload.decode().partition(":")
                assert int(seq) == action.seq
                found.append((action.seq, process))
        return found

    def seqs(self) -> list[int]:
        return [seq for seq, _ in self.run()]

    def count(self, kind: type[Action]) -> int:
        return sum(isinstance(action, kind) for action in self.out)

    def lost(self) -> int:
        return sum(action.batches for action in self.out if isinstance(action, Lost))

    def outcomes(self) -> list[str]:
        return [action.outcome for action in self.out if isinstance(action, Replayed)]


def joined(*, replay: bool = True, upto: int = 5) -> Script:
    """A live stream that has applied 0..upto."""
    script = Script(replay=replay)
    if replay:
        script.answer(*range(upto + 1))
    else:
        script.live(*range(upto + 1))
    assert script.tracker.state == "live"
    assert script.tracker.history == "complete"
    return script


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


def test_a_first_live_batch_one_needs_no_replay() -> None:
    script = Script()
    script.live(1)
    assert (script.seqs(), script.tracker.state, script.tracker.history) == ([1], "live", "complete")
    script.answer(1, 2)  # of the cancelled ask
    assert script.seqs() == [1]


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


def test_a_restart_while_a_hole_is_asked_for_drops_what_waited() -> None:
    script = joined()
    script.live(6, 9, 10)
    old = script.ask.ask
    script.live(1, 2, process="b")
    script.answer(7, 8, 9, 10, ask=old)
    assert script.run() == [(1, "b"), (2, "b")]
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

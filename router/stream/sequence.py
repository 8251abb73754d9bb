"""Sequence numbers → batches applied exactly once and in order, or an openly doubted rank. No I/O, no clock.

Promise: what was applied since the last reset is a run of consecutive batches of ONE publisher process. A tracker takes
what happened (messages, connection changes, replay answers, time) and yields actions; its tests are transcripts.

    connecting   no connection, or one that has not shown yet whether the engine behind it is still the same
    replaying    joined or reconnected, earlier batches asked for; live ones wait in order
    gapped       a hole was seen and is being asked for; live batches wait in order
    live         every number so far was had, or what was lost has been paid for by a reset
    duplicated   two publishers speak here at once: nothing is applied until one of them is gone
    unreachable  nothing accepts connections at the endpoint
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from router.stream.interleave import Interleaving
from router.stream.recent import RecentBatches
from router.stream.replay import END_SEQ, Purpose, Recovery, StreamLimits, behind_last_hole, numbers

FIRST_SEQS = (0, 1)
"""A stream heard from here is heard whole: 0 is the clear of cache construction, sent before anyone can subscribe.

(On SGLang. vLLM's 0 can be a store: where there is a replay socket, 1 still waits for it.)
"""
LATE = 8
"""Of the numbers missing before a batch, so many may still come: they were overtaken, and are no sign of a restart."""


class SequenceTracker:
    """State machine of one rank's stream. Every method returns the actions it causes, to be done in that order.

    After any call, while `backlog` is true, `drain` has batches to hand out: in slices, so that a long backlog does not
    hold up the event loop. `tick` is due at `deadline_s`. All times are of one monotonic clock, in seconds.
    """

    def __init__(self, endpoint: str, *, replay: bool, now_s: float, limits: StreamLimits | None = None) -> None:
        """`replay`: a replay socket exists. `endpoint` appears in reasons."""
        self.state = "connecting"
        self.reason = f"not connected to {endpoint} yet"
        self.history = "partial"
        self.last_seq: int | None = None
        """The last batch applied, of the current publisher process."""
        self._endpoint = endpoint
        self._replay = replay
        self._limits = limits or StreamLimits()
        self._next: int | None = None
        self._last_live: int | None = None
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._held_live_from: int | None = None
        self._given_up = range(0)
        self._recent = RecentBatches()
        self._connected = False
        self._down_since_s = now_s
        self._trouble = ""
        self._doubt = False  # reconnected, and nothing has come since
        self._unproven = False  # reconnected, and no replay has shown since that the process is the same
        self._recovery: Recovery | None = None
        self._asks = 0
        self._replay_barred_until_s = -math.inf
        self._turns = Interleaving()
        self._duplicated = False
        self._live_reason = "connected, no batch yet"
        self._out: list[Action] = []

    # ---------------------------------------------------------------- what happens

    def connected(self, now_s: float) -> Sequence[Action]:
        """A publisher accepted the subscription. What an earlier connection had queued must have been given before."""
        if self._connected:
            self._drop_connection()
        self._connected = True
        self._duplicated = False
        self._turns.reconnected()
        self._doubt = self._unproven = self._next is not None
        if self._can_ask(now_s):
            self._recover("reconnect" if self._doubt else "join", now_s)
        self._settle()
        return self._flush()

    def disconnected(self, why: str, now_s: float) -> Sequence[Action]:
        """The connection is gone, or an attempt failed in a way worth naming."""
        if self._connected:
            self._drop_connection()
            self._connected = self._duplicated = False
            self._down_since_s = now_s
        self._trouble = f" (last: {why})"
        if self.state != "unreachable":
            self._be("connecting", why)
        return self._flush()

    def in_line(self, seq: int, payload: bytes) -> bool:
        """A well-formed live message. True: it was the expected one, is counted as applied, and that is all. False:
        nothing happened, `live` is to decide."""
        if seq != self._next or self._held or self._recovery is not None or self._doubt:
            return False
        self._last_live = self.last_seq = seq
        self._next = seq + 1
        self._recent.add(seq, payload)
        return True

    def live(self, seq: int, payload: bytes, now_s: float) -> Sequence[Action]:
        """A well-formed live message. `END_SEQ` says that the publisher ends (case 8)."""
        if self.in_line(seq, payload):
            return (Apply(seq, payload),)
        if seq == END_SEQ:
            self._ended()
        elif self._connected and (not self._duplicated or self._one_is_left(seq, now_s)):
            self._live_out_of_line(seq, payload, now_s)
        # else: read late from a lost connection, and not in line. It will be found missing after the reconnect.
        return self._flush()

    def replay_batch(self, ask: int, seq: int, payload: bytes, now_s: float) -> Sequence[Action]:
        """One answer of the replay socket. Answers to an earlier ask change nothing (case 22)."""
        recovery = self._recovery
        if recovery is None or recovery.ask != ask:
            return ()
        if seq == END_SEQ:
            recovery.answered = True
            self._attempt_over(recovery, now_s, ended=True)
        else:
            recovery.heard_s, recovery.answered = now_s, True
            self._answer(recovery, seq, payload, now_s)
        return self._flush()

    def tick(self, now_s: float) -> Sequence[Action]:
        """Time passed."""
        if self._recovery is not None and now_s >= self._recovery.deadline_s(self._limits):
            self._attempt_over(self._recovery, now_s, ended=False)
        if not self._connected and now_s - self._down_since_s >= self._limits.unreachable_after_s:
            silence = f"no publisher answered at {self._endpoint} for {self._limits.unreachable_after_s:g} s"
            self._be("unreachable", f"{silence}{self._trouble}: check host, port, and that the engine binds it")
        return self._flush()

    @property
    def deadline_s(self) -> float | None:
        """When `tick` is due next, if nothing else happens."""
        if self._recovery is not None:
            return self._recovery.deadline_s(self._limits)
        if not self._connected and self.state != "unreachable":
            return self._down_since_s + self._limits.unreachable_after_s
        return None

    @property
    def backlog(self) -> bool:
        """`drain` has work. Read no further live messages before it is done: they would only queue up behind."""
        return bool(self._held) and self._recovery is None

    def drain(self, limit: int, now_s: float) -> Sequence[Action]:
        """At most `limit` held batches, as far as they are in line."""
        while self.backlog and limit > 0:
            if self._next is None or self._next not in self._held:
                self._hole(now_s)
                break
            self._out.append(self._take(self._next, self._release(self._next)))
            limit -= 1
        self._settle()
        return self._flush()

    # ---------------------------------------------------------------- live messages

    def _live_out_of_line(self, seq: int, payload: bytes, now_s: float) -> None:
        if self._last_live is not None and seq <= self._last_live:
            if self._same(seq, payload):
                self._out.append(Rejected("duplicate"))
                return
            if seq in self._given_up:
                self._out.append(Rejected("late"))
                return
            if self._fills_hole(seq):
                self._hold(seq, payload)
                return
            if self._turned(seq, self._last_live, now_s):
                return
            self._start_over(f"the sequence went back from {self._last_live} to {seq}: the engine restarted")
        elif self._last_live is not None and seq != self._last_live + 1 and self._turns.continues_another(seq):
            if self._turned(seq, self._last_live, now_s):
                return
            self._start_over(f"the sequence went from {self._last_live} to {seq}, back to an earlier publisher's")
        elif self._same(seq, payload) is False:
            if self._contradicted(seq, now_s):
                return
            self._start_over(f"batch {seq} is not the one that replay gave: the engine restarted")
        self._last_live = seq
        if self._next is not None and seq < self._next:
            return  # replay had run ahead of the live socket's queue
        if self._next is None and seq == 0:
            self._cancel_recovery()
            self._anchor(seq)
        elif self._doubt and seq == self._next and self._recovery is None:
            self._doubt = False
            self._live_reason = f"reconnected, and went on with batch {seq}"
        if self._held_live_from is None:
            self._held_live_from = seq
        self._hold(seq, payload)
        if self._recovery is None and self._held and self._next not in self._held:
            self._hole(now_s)

    def _fills_hole(self, seq: int) -> bool:
        """A batch that is being asked for, late. (Of another process it would not be what replay says.)"""
        if self._recovery is None or self._recovery.purpose != "gap" or self._next is None:
            return False
        end = min(self._held, default=0)
        return max(self._next, end - LATE) <= seq < end

    def _turned(self, seq: int, last: int, now_s: float) -> bool:
        """Takes note of a turn that one publisher does not take. True: there are two, and neither is believed."""
        if self._turns.turned(seq, last):
            self._distrust_both(seq, f"their numbers interleave ({seq} after {last})", now_s)
        return self._duplicated

    def _contradicted(self, seq: int, now_s: float) -> bool:
        """Replay and the live stream had different batches under one number. True: that happens again and again."""
        if self._turns.contradicted(now_s):
            self._distrust_both(seq, f"replay answers for another one than the live stream's (batch {seq})", now_s)
        return self._duplicated

    def _distrust_both(self, seq: int, what: str, now_s: float) -> None:
        self._start_over(f"two publishers behind one endpoint: {what}")
        self._duplicated = True
        self._turns.watch(seq, now_s)
        self._be(
            "duplicated",
            f"two publishers speak for {self._endpoint}: {what}. Give every rank event and replay ports of its own, on "
            "an engine where one process a rank publishes (SGLang before the context-parallel fix ran one per CP rank)",
        )

    def _one_is_left(self, seq: int, now_s: float) -> bool:
        if self._turns.calm(seq, now_s, self._limits.duplicate_calm_s):
            self._duplicated = False
        return not self._duplicated

    def _same(self, seq: int, payload: bytes) -> bool | None:
        """Is this the batch had under that number? None: no such batch is remembered."""
        if seq in self._held:
            return self._held[seq] == payload
        return self._recent.same(seq, payload)

    def _hold(self, seq: int, payload: bytes) -> None:
        if seq in self._held:
            return
        self._held[seq] = payload
        self._held_bytes += len(payload)
        if len(self._held) > self._limits.held_batches or self._held_bytes > self._limits.held_bytes:
            self._give_up("too many batches waited for replay")

    def _release(self, seq: int) -> bytes:
        payload = self._held.pop(seq)
        self._held_bytes -= len(payload)
        return payload

    def _ended(self) -> None:
        self._duplicated = False
        self._start_over("the publisher ended its stream")
        self._live_reason = "a new publisher's first batch has not come yet"
        self._be("connecting", "the publisher ended its stream; waiting for a new one")

    # ---------------------------------------------------------------- recovery

    def _hole(self, now_s: float) -> None:
        """Batches wait and the next one is not among them: ask for it, or pay for it."""
        if self._can_ask(now_s):
            self._recover("join" if self._next is None else "gap", now_s)
        else:
            self._give_up("replay failed just before" if self._replay else "there is no replay socket")

    def _recover(self, purpose: Purpose, now_s: float) -> None:
        self._recovery = recovery = Recovery(purpose, now_s)
        if purpose == "gap":
            self._out.append(Gap())
            self._be("gapped", f"{numbers(self._next or 0, min(self._held))} never came; asked replay")
        elif purpose == "join":
            self._be("replaying", "asked replay for every batch from 0")
        else:
            self._be("replaying", f"reconnected after batch {self.last_seq}; asked replay for what was missed")
        self._ask(recovery, now_s)

    def _ask(self, recovery: Recovery, now_s: float) -> None:
        self._asks += 1
        recovery.asked(self._asks, now_s)
        start = self._next or 0
        if self._unproven and self.last_seq is not None:
            start = self.last_seq  # the overlap proves whether it is still the same process
        self._out.append(AskReplay(self._asks, start))

    def _answer(self, recovery: Recovery, seq: int, payload: bytes, now_s: float) -> None:
        if self._unproven and not self._settle_doubt(recovery, seq, payload, now_s):
            return
        if self._next is None:
            self._anchor(min(seq, min(self._held, default=seq)))
        if seq in self._held and not self._same(seq, payload):
            if self._contradicted(seq, now_s):
                return
            self._restarted_while_asking(f"replay's batch {seq} is not the live one", now_s)
        elif seq == self._next:
            recovery.progressed = True
            self._out.append(self._take(seq, payload))
            if seq in self._held:
                self._release(seq)
            if self._held_live_from is not None and seq >= self._held_live_from:  # caught up with the live stream
                self._out.append(CancelReplay(recovery.ask))
                self._recovered("filled")
        elif self._next is not None and seq > self._next:
            self._hold(seq, payload)

    def _settle_doubt(self, recovery: Recovery, seq: int, payload: bytes, now_s: float) -> bool:
        """After a reconnect the last batch applied is asked for again. True: `seq` is still to be dealt with."""
        last_seq = self.last_seq
        if last_seq is None or seq < last_seq:
            return False
        if seq > last_seq:
            reach = min(seq, min(self._held, default=seq))
            self._skip_to(reach, reach - last_seq - 1, f"after a reconnect replay begins at {seq}", recovery)
            return True
        if self._same(seq, payload):
            self._doubt = self._unproven = False
            recovery.progressed = True
        else:
            self._restarted_while_asking(f"after a reconnect batch {seq} is another one", now_s)
        return False

    def _restarted_while_asking(self, why: str, now_s: float) -> None:
        self._start_over(f"{why}: the engine restarted")
        self._recover("join", now_s)

    def _attempt_over(self, recovery: Recovery, now_s: float, *, ended: bool) -> None:
        """An ask got its end mark, or no answer for too long."""
        if self._unproven and ended:
            self._restarted_while_asking(f"after a reconnect replay has no batch {self.last_seq}", now_s)
            return
        hole = bool(self._held) and self._next not in self._held
        spent = recovery.spent(self._limits, now_s)
        # Without an end mark, answers that stop short of the live stream may have been cut: ask on until nothing comes.
        complete = ended or (recovery.answered and (bool(self._held) or recovery.stalls > 0))
        if not hole and (complete or spent):
            self._bar_replay_unless_heard(recovery, now_s)
            self._doubt = self._doubt and not self._held
            self._out.append(CancelReplay(recovery.ask))
            self._recovered("timeout" if not recovery.answered else "filled")
        elif spent:
            self._bar_replay_unless_heard(recovery, now_s)
            self._give_up("replay does not have it" if recovery.answered else "the replay socket does not answer")
        else:
            self._out.append(CancelReplay(recovery.ask))
            self._ask(recovery, now_s)

    def _recovered(self, outcome: str) -> None:
        """Nothing is missing any more, as far as can be told."""
        recovery, self._recovery = self._recovery, None
        if self._next is None and outcome == "filled":
            outcome = "empty"
        elif outcome == "filled" and self.history == "partial" and recovery is not None and recovery.purpose == "join":
            outcome = "partial"
        elif outcome == "filled" and recovery is not None and recovery.purpose != "join":
            self._live_reason = f"replay filled what was missing up to batch {self.last_seq}"
        self._out.append(Replayed(outcome))
        self._settle()

    def _give_up(self, why: str) -> None:
        """What was held before the hole is void, and the stream goes on behind it (settled rule 1).

        If there are several holes it goes on behind the last: each would void what came before it.
        """
        recovery, self._recovery = self._recovery, None
        if recovery is not None:
            self._out += (CancelReplay(recovery.ask), Replayed("unfilled" if recovery.answered else "timeout"))
        if self._next in self._held:  # a limit was hit, not a hole
            self._doubt = False
            return
        target = behind_last_hole(self._held)
        dropped = [seq for seq in self._held if seq < target]
        for seq in dropped:
            self._release(seq)
        if self._next is None:
            self._anchor(target)
            return
        self._skip_to(target, target - self._next - len(dropped), why, recovery)

    def _skip_to(self, target: int, lost: int, why: str, recovery: Recovery | None) -> None:
        before = self._next or 0
        if self._unproven:
            why += "; it may be another process by now"
        reason = f"{numbers(before, target)} lost ({why})" if target > before else why
        if lost and (recovery is None or recovery.purpose != "gap"):  # else counted when it was asked for
            self._out.append(Gap())
        if lost:
            self._out.append(Lost(lost))
        self._forget(reason)
        self._given_up = range(max(before, target - LATE), target)
        self._anchor(target)
        self._live_reason = f"{reason}; what was held before is void"

    # ---------------------------------------------------------------- small parts

    def _take(self, seq: int, payload: bytes) -> Apply:
        self._recent.add(seq, payload)
        self.last_seq = seq
        self._next = seq + 1
        return Apply(seq, payload)

    def _anchor(self, seq: int) -> None:
        """Begin a run at `seq`."""
        self._next = seq
        whole = seq in FIRST_SEQS
        self.history = "complete" if whole else "partial"
        self._live_reason = (
            "heard from the first batch" if whole else f"joined at batch {seq}; what came before is unknown"
        )

    def _forget(self, reason: str) -> None:
        """End the run: nothing of it is remembered, not even its numbers."""
        self._out.append(Reset(reason))
        self._next = self.last_seq = None
        self._doubt = self._unproven = False
        self.history = "partial"
        self._recent.forget()

    def _start_over(self, reason: str) -> None:
        """Another process's stream begins, with whatever comes next."""
        self._cancel_recovery()
        if self._next is not None or self._held:
            self._out.append(Restarted())
            self._forget(reason)
        self._drop_held()
        self._last_live = None
        self._given_up = range(0)

    def _drop_connection(self) -> None:
        """What waits for replay came over the lost connection; replay has it again, if the process is the same."""
        if self._recovery is not None:
            self._cancel_recovery()
            self._drop_held()

    def _drop_held(self) -> None:
        self._held.clear()
        self._held_bytes = 0
        self._held_live_from = None

    def _cancel_recovery(self) -> None:
        if self._recovery is not None:
            self._out += (CancelReplay(self._recovery.ask), Replayed("cancelled"))
            self._recovery = None

    def _can_ask(self, now_s: float) -> bool:
        return self._replay and now_s >= self._replay_barred_until_s

    def _bar_replay_unless_heard(self, recovery: Recovery, now_s: float) -> None:
        if not recovery.answered:
            self._replay_barred_until_s = now_s + self._limits.replay_cooldown_s

    def _settle(self) -> None:
        if not self._held and self._recovery is None:
            self._held_live_from = None
        if not self._connected or self._recovery is not None or self._held or self._duplicated:
            return
        if self._doubt:
            self._be("connecting", "reconnected; the next batch shows whether the engine restarted meanwhile")
        else:
            self._be("live", self._live_reason)

    def _be(self, state: str, reason: str) -> None:
        if (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            self._out.append(StateChanged(state, reason, self.history))

    def _flush(self) -> Sequence[Action]:
        out, self._out = self._out, []
        return out

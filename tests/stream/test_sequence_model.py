"""The tracker against a model of engines, connections and replay sockets, under random interleavings.

Whatever is published, dropped, burned, delivered twice, cut off, restarted or replayed badly: what was applied since
the last reset is a run of consecutive batches of one publisher process; and once the world behaves, the rank is live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from router.stream.actions import Action, Apply, AskReplay, CancelReplay, Reset, StateChanged
from router.stream.replay import END_SEQ, StreamLimits
from router.stream.sequence import SequenceTracker

LIMITS = StreamLimits(held_batches=8, held_bytes=10_000, replay_stalls=2)
BUFFER = 6
Message = tuple[int, bytes]


class Engine:
    """One publisher process: what it numbered, and what its replay buffer still has."""

    def __init__(self, process: int) -> None:
        self.process = process
        self.next_seq = 0
        self.buffer: deque[Message] = deque(maxlen=BUFFER)

    def publish(self) -> Message:
        message = (self.next_seq, f"{self.process}:{self.next_seq}".encode())
        self.buffer.append(message)
        self.next_seq += 1
        return message


class StreamMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.engine = self.new_engine(0)
        self.link = False
        self.queue: deque[Message] = deque()  # of the live socket, oldest first
        self.answers: deque[tuple[int, int, bytes]] = deque()  # (ask, seq, payload) on their way
        self.ask: AskReplay | None = None
        self.applied: list[Message] = []
        self.delivered: Message | None = None
        self.told = ""

    def new_engine(self, process: int) -> Engine:
        return Engine(process)

    @initialize(replay=st.booleans())
    def begin(self, replay: bool) -> None:
        self.tracker = SequenceTracker("tcp://h:1", replay=replay, now_s=self.now_s, limits=LIMITS)
        self.told = self.tracker.state

    def took(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Apply(seq, payload):
                    self.applied.append((seq, payload))
                case Reset():
                    self.applied = []
                case AskReplay():
                    self.ask = action
                case CancelReplay(ask):
                    if self.ask is not None and self.ask.ask == ask:
                        self.ask = None
                case StateChanged(state, _, _):
                    self.told = state
                case _:
                    pass

    def drain(self) -> None:
        while self.tracker.backlog:
            self.took(self.tracker.drain(3, self.now_s))

    # ------------------------------------------------------------ the world

    @rule(count=st.integers(1, 4), arrives=st.booleans())
    def publish(self, count: int, arrives: bool) -> None:
        for _ in range(count):
            message = self.engine.publish()
            if self.link and arrives:
                self.queue.append(message)

    @rule()
    def burn_a_number(self) -> None:
        self.engine.next_seq += 1

    @rule()
    def end_stream(self) -> None:
        if self.link:
            self.queue.append((END_SEQ, b""))
        self.restart(0)

    @rule(already=st.integers(0, 12))
    def restart(self, already: int) -> None:
        self.cut()
        self.engine = self.new_engine(self.engine.process + 1)
        for _ in range(already):
            self.engine.publish()

    @rule()
    def cut(self) -> None:
        if self.link:
            self.link = False
            self.took(self.tracker.disconnected("cut", self.now_s))

    @rule()
    def connect(self) -> None:
        if not self.link:
            while self.queue:  # RankStream empties the socket of the lost connection's messages first
                self.deliver()
            self.link = True
            self.took(self.tracker.connected(self.now_s))

    @precondition(lambda self: len(self.queue) > 1)
    @rule()
    def reorder(self) -> None:
        """No TCP connection does this; a relay that merges two might."""
        self.queue[-1], self.queue[-2] = self.queue[-2], self.queue[-1]

    @precondition(lambda self: self.queue)
    @rule()
    def deliver(self) -> None:
        self.drain()
        message = self.queue.popleft()
        if self._undetectable(message):
            return
        self.delivered = message
        self.took(self.tracker.live(*message, self.now_s))

    def _undetectable(self, message: Message) -> bool:
        """Another process whose first batch seen carries the very next number: nothing on the wire tells it apart."""
        before = [seen for seen in (self.delivered, self.applied[-1] if self.applied else None) if seen is not None]
        return any(
            message[0] == seq + 1 and payload.partition(b":")[0] != message[1].partition(b":")[0]
            for seq, payload in before
        )

    @precondition(lambda self: self.delivered is not None and self.link and not self.queue)
    @rule()
    def deliver_again(self) -> None:
        if self.delivered is not None and self.delivered[1].startswith(b"%d:" % self.engine.process):
            self.took(self.tracker.live(*self.delivered, self.now_s))

    @precondition(lambda self: self.ask is not None)
    @rule(dropped=st.sets(st.integers(0, BUFFER - 1)), end=st.booleans())
    def serve_replay(self, dropped: set[int], end: bool) -> None:
        if self.ask is None:
            return
        for index, (seq, payload) in enumerate(self.engine.buffer):
            if seq >= self.ask.start and index not in dropped:
                self.answers.append((self.ask.ask, seq, payload))
        if end:
            self.answers.append((self.ask.ask, END_SEQ, b""))

    @precondition(lambda self: self.answers)
    @rule(count=st.integers(1, 4))
    def answer(self, count: int) -> None:
        for _ in range(min(count, len(self.answers))):
            self.took(self.tracker.replay_batch(*self.answers.popleft(), self.now_s))

    @rule(seconds=st.sampled_from([0.1, 1.0, 1.6, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.took(self.tracker.tick(self.now_s))

    @rule()
    def hand_out_backlog(self) -> None:
        self.drain()

    # ------------------------------------------------------------ what must hold

    @invariant()
    def one_run_of_one_process(self) -> None:
        for (seq, payload), (after, next_payload) in zip(self.applied, self.applied[1:], strict=False):
            assert after == seq + 1
            assert payload.partition(b":")[0] == next_payload.partition(b":")[0]

    @invariant()
    def what_is_told_is_what_is(self) -> None:
        if hasattr(self, "tracker"):
            assert self.told == self.tracker.state
            assert self.tracker.last_seq == (self.applied[-1][0] if self.applied else None)
            assert len(self.tracker._held) <= LIMITS.held_batches + 1
            assert self.tracker._held_bytes == sum(map(len, self.tracker._held.values()))

    def teardown(self) -> None:
        """The world behaves from here on: the rank must become live, and hold the newest batch."""
        if not hasattr(self, "tracker"):
            return
        self.cut()
        for _ in range(4):
            self.connect()
            self.publish(1, True)
            self.settle()
        assert self.tracker.state == "live"
        assert self.applied
        assert self.applied[-1] == self.engine.buffer[-1]
        self.one_run_of_one_process()

    def settle(self) -> None:
        for _ in range(200):
            if self.queue and not self.tracker.backlog:
                self.deliver()
            self.drain()
            if self.ask is not None and not self.answers:
                self.serve_replay(set(), True)
            if self.answers:
                self.answer(1)
            if not (self.queue or self.answers or self.tracker.backlog):
                self.wait(1.6)
                if self.ask is None:
                    return
        raise AssertionError("never comes to rest")


TestStreamMachine = StreamMachine.TestCase
TestStreamMachine.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

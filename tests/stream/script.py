"""A sequence tracker driven by hand: what the transcripts of test_sequence*.py are written in."""

from __future__ import annotations

from collections.abc import Sequence

from router.stream.actions import Action, Apply, AskReplay, Lost, Replayed, Reset
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

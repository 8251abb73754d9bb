"""Two publishers behind one endpoint (cases 16, 18), told from one that restarts by how their numbers interleave.

A restarted process never speaks again under its old numbers. So a sequence that was left and is gone on with exactly
where it was left (A … B … A) speaks for two publishers, and so does a sequence that turns back again and again over
one connection: a process that really restarts takes its connection with it. Pure; counts messages, not seconds, so that
two slow publishers are found as well as two fast ones.
"""

from __future__ import annotations

STRIKES = 3
"""Turns no single publisher takes, after which there are two. A … B … A … B has three."""
FORGIVEN_AFTER = 256
"""Batches in line after which an earlier turn is taken for a restart after all."""
REMEMBERED = 4
"""Sequences whose last numbers are kept."""
CONTRADICTION_S = 30.0
"""Contradictions between replay and the live stream count together when they are no further apart than this."""
CALM_BATCHES = (4, 1024)
"""Batches in line that show, with time, that only one publisher is left; four times as many after every mistake."""


class Interleaving:
    """Follows where sequences were left. `last`: the newest number of the sequence now speaking."""

    def __init__(self) -> None:
        self._strikes = 0
        self._left: list[int] = []
        self._began: int | None = None
        self._last = 0
        self._in_line = 0
        self._calm_batches = 0
        self._switched_s = 0.0
        self._contradicted_s = -CONTRADICTION_S

    def continues_another(self, seq: int) -> bool:
        """`seq` is the very next number of a sequence that was left."""
        return seq - 1 in self._left

    def turned(self, seq: int, last: int) -> bool:
        """The stream went from `last` to `seq`, backwards or to another content. True: there are two publishers."""
        returned = self.continues_another(seq)
        if seq in (0, 1) and not returned:
            self._strikes = 0  # where every new process begins: a restart, if anything is
        elif not returned and self._began is not None and last - self._began >= FORGIVEN_AFTER:
            self._strikes = 1
        else:
            self._strikes += 1
        if returned:
            self._left.remove(seq - 1)
        self._left = [*self._left[1 - REMEMBERED :], last]
        self._began = seq
        return self._strikes >= STRIKES

    def contradicted(self, now_s: float) -> bool:
        """Replay gave another batch than the live stream: a restart in between, if it happens once or twice."""
        recent = now_s - self._contradicted_s <= CONTRADICTION_S
        self._contradicted_s = now_s
        self._strikes = self._strikes + 1 if recent else max(1, self._strikes)
        return self._strikes >= STRIKES

    def reconnected(self) -> None:
        """Over a new connection a sequence may turn back once, as that of a new process."""
        self._strikes = max(0, self._strikes - 1)
        self._left = []
        self._calm_batches = 0

    # While there are two: is one of them gone?

    def watch(self, seq: int, now_s: float) -> None:
        """They were found just now, with `seq`."""
        self._last, self._in_line, self._switched_s = seq, 0, now_s
        self._calm_batches = min(max(CALM_BATCHES[0], 4 * self._calm_batches), CALM_BATCHES[1])

    def calm(self, seq: int, now_s: float, after_s: float) -> bool:
        """Another message came. True: for `after_s` seconds only one sequence has spoken. One more turn is enough to
        doubt it again."""
        if seq == self._last + 1:
            self._in_line += 1
        else:
            self._in_line, self._switched_s = 0, now_s
        self._last = seq
        if self._in_line < self._calm_batches or now_s - self._switched_s < after_s:
            return False
        self._strikes, self._left, self._began = STRIKES - 1, [], seq
        return True

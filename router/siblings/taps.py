"""What looks on at a rank's stream while its blocks are told to a sibling or learnt from one (Tap of fleet.rank)."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from router.fleet.rank import Rank

MAX_KEPT_BYTES = 32 << 20
MAX_KEPT_BATCHES = 20_000


def digest(payload: bytes) -> bytes:
    """Two publisher processes do not send the same bytes under one number: a batch begins with its time."""
    return blake2b(payload, digest_size=16).digest()


class Batches:
    """The batches of a rank's stream from now on, in bounded memory. `void`: they are not, or no longer, one run.

    While `holding` they are kept back from the rank, whose state stays that of one batch; `release` hands them on.
    """

    def __init__(self, rank: Rank, *, holding: bool) -> None:
        self.rank = rank
        self.holding = holding
        self.void = rank.dead or rank.last_seq is None or rank.tap is not None
        self.kept: dict[int, bytes] = {}
        self.spoilt: Callable[[], None] | None = None
        """Called before batches that were held are handed on because there are too many."""
        self._bytes = 0
        if not self.void:
            assert rank.last_seq is not None
            self.kept[rank.last_seq] = rank.last_payload
            rank.tap = self

    def takes(self, seq: int, payload: bytes) -> bool:
        self._bytes += len(payload)
        if self._bytes > MAX_KEPT_BYTES or len(self.kept) >= MAX_KEPT_BATCHES:
            self.void = True
            if self.spoilt is not None:
                self.spoilt()
            if self.holding:
                self.release(self.rank.last_seq)
            self.close()
            return False
        self.kept[seq] = payload
        return self.holding

    def broken(self) -> None:
        self.void = True
        self.kept.clear()

    def release(self, after_seq: int | None, limit: int = MAX_KEPT_BATCHES) -> bool:
        """Applies up to `limit` of the batches kept that come after `after_seq`, in order. True: there are more."""
        rank = self.rank
        rank.tap = None
        waiting = [seq for seq in self.kept if after_seq is None or seq > after_seq]
        for seq in waiting[:limit]:
            rank.apply(seq, self.kept.pop(seq))
        rank.rested()
        if not self.void:
            rank.tap = self
        return len(waiting) > limit

    def close(self) -> None:
        """The rank's stream is looked at no more."""
        if self.rank.tap is self:
            self.rank.tap = None
        self.kept.clear()

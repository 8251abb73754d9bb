"""The digests of the last batches applied: tells a batch delivered again from another process's (cases 18, 23)."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

RECENT = 64
"""Batches remembered."""


class RecentBatches:
    """By number; the newest RECENT of them."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._digests: list[tuple[int, int]] = [(-1, 0)] * RECENT

    def add(self, seq: int, payload: bytes) -> None:
        self._digests[seq % RECENT] = (seq, xxh3_64_intdigest(payload))

    def same(self, seq: int, payload: bytes) -> bool | None:
        """Was this the batch applied under that number? None: that number is not remembered."""
        known, digest = self._digests[seq % RECENT]
        return digest == xxh3_64_intdigest(payload) if known == seq else None

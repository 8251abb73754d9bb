"""What was just placed here, told to the siblings, and what they placed, taken as predicted blocks. Pure.

Without it routers that are asked the same within one prefill have it computed once each (public case 53). A prediction
is only a hint: what has no room in a frame is not told, nor that a request failed; the receiver's own time to live
heals both.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence

from router.hashing import Scheme
from router.policy.predicted import PredictedBlocks
from router.siblings.frames import MAX_PLACED, MAX_PLACED_KEYS, Placed

KEY_BYTES = 8
FRAME_BYTES = 64 << 10
"""Of placements in one frame."""
OVERHEAD_BYTES = 32
"""Of one placement in a frame, without its keys and its worker's name; rather too much."""

FindSlot = Callable[[str, int, tuple[str, int, bool]], int | None]
"""(worker URL, rank, scheme) → the slot of that rank's blocks; None where it is unknown or keyed by another scheme."""


class Placements:
    """`predicted` is the router's own: a sibling's placement lives and is bounded there exactly as one made here."""

    def __init__(self, predicted: PredictedBlocks, slot_of: FindSlot) -> None:
        self._predicted = predicted
        self._slot_of = slot_of
        self._made: list[tuple[str, int, Scheme, Sequence[int]]] = []
        self._room_bytes = FRAME_BYTES

    def made(self, worker: str, rank: int, scheme: Scheme, keys: Sequence[int]) -> None:
        """A prompt was placed here; `keys` of its blocks that are not confirmed there. On the path of every request, so
        that they become bytes only in `told`."""
        needed_bytes = KEY_BYTES * min(len(keys), MAX_PLACED_KEYS) + len(worker) + OVERHEAD_BYTES
        if needed_bytes <= self._room_bytes:
            self._room_bytes -= needed_bytes
            self._made.append((worker, rank, scheme, keys))

    def told(self) -> list[Placed]:
        """What was placed since the last call, for one frame."""
        if not self._made:
            return []
        made, self._made = self._made, []
        self._room_bytes = FRAME_BYTES
        return [
            Placed(worker, rank, scheme.kind, scheme.width, scheme.bigram, packed(keys[:MAX_PLACED_KEYS]))
            for worker, rank, scheme, keys in made[:MAX_PLACED]
        ]

    def take(self, placed: Sequence[Placed], now_s: float) -> None:
        """A sibling placed these."""
        for one in placed:
            slot = self._slot_of(one.worker, one.rank, (one.kind, one.width, one.bigram))
            if slot is not None:
                self._predicted.add(slot, unpacked(one.keys), now_s)


def packed(keys: Sequence[int]) -> bytes:
    """Signed, 8 bytes each, little-endian."""
    made = array("q", keys)
    if sys.byteorder == "big":
        made.byteswap()
    return made.tobytes()


def unpacked(data: bytes) -> Sequence[int]:
    """The keys; bytes at the end that are no whole key are left out."""
    made = array("q", data[: len(data) // KEY_BYTES * KEY_BYTES])
    if sys.byteorder == "big":
        made.byteswap()
    return made

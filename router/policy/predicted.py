"""Blocks a rank will hold soon: prompts routed there whose events have not come yet (public case 53).

Short-lived and bounded. Confirmed blocks live in the index; this only bridges the time between a placement and the
BlockStored that follows its prefill, so that siblings of a burst meet on one rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

EXPIRED_AT_ONCE = 8192  # blocks
MAX_PREDICTED_BLOCKS = 500_000


class Prediction:
    """One placed prompt's blocks on one slot."""

    __slots__ = ("alive", "expires_s", "keys", "slot")

    def __init__(self, slot: int, keys: Sequence[int], expires_s: float) -> None:
        self.slot = slot
        self.keys = keys
        self.expires_s = expires_s
        self.alive = True


class PredictedBlocks:
    """Counts of predicted blocks per slot, with a time to live."""

    def __init__(self, ttl_s: float, max_blocks: int = MAX_PREDICTED_BLOCKS) -> None:
        self.ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._slots: dict[int, dict[int, int]] = {}
        self._queue: deque[Prediction] = deque()
        self._blocks = 0

    def add(self, slot: int, keys: Sequence[int], now_s: float) -> Prediction | None:
        """Predicts `keys` on `slot`; None when prediction is off or there is nothing to predict."""
        if self.ttl_s <= 0 or not keys or len(keys) > self._max_blocks:
            return None
        self.expire(now_s)
        while self._blocks + len(keys) > self._max_blocks and self._queue:
            self.drop(self._queue.popleft())
        counts = self._slots.setdefault(slot, {})
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        prediction = Prediction(slot, keys, now_s + self.ttl_s)
        self._queue.append(prediction)
        self._blocks += len(keys)
        return prediction

    def drop(self, prediction: Prediction) -> None:
        """The request failed or the time is over: its blocks are no longer expected."""
        if not prediction.alive:
            return
        prediction.alive = False
        self._blocks -= len(prediction.keys)
        counts = self._slots.get(prediction.slot)
        if counts is None:
            return
        for key in prediction.keys:
            left = counts.get(key, 0) - 1
            if left > 0:
                counts[key] = left
            else:
                counts.pop(key, None)
        if not counts:
            del self._slots[prediction.slot]

    def expire(self, now_s: float) -> None:
        """Forgets what is over; of a great many long prompts at once, some at the next call (1 ms for 8,192 blocks)."""
        left = EXPIRED_AT_ONCE
        while left > 0 and self._queue and (self._queue[0].expires_s <= now_s or not self._queue[0].alive):
            prediction = self._queue.popleft()
            left -= len(prediction.keys) if prediction.alive else 1
            self.drop(prediction)

    def extend(self, keys: Sequence[int], found: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
        """(slot, blocks) of the slots on which predictions lengthen the prefix of `keys`. `found` has the confirmed
        depths by slot, the last of each being that of all tiers."""
        longer = []
        limit = len(keys)
        for slot, counts in self._slots.items():
            confirmed = found.get(slot)
            depth = confirmed[-1] if confirmed is not None else 0
            if depth == limit or keys[depth] not in counts:
                continue
            while depth < limit and keys[depth] in counts:
                depth += 1
            longer.append((slot, depth))
        return longer

    def __len__(self) -> int:
        return self._blocks

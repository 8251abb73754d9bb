"""Blocks a rank will hold soon: prompts routed there whose events have not come yet (public case 53).

Short-lived and bounded. Confirmed blocks live in the index; this only bridges the time between a placement and the
BlockStored that follows its prefill, so that siblings of a burst meet on one rank.

A slot's blocks are kept in runs, the pieces of prompts that the same predictions name: what a prompt shares with others
costs a step a run, not one a block. A run is cut where a prompt parts from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

Key = object
"""A block's key, an int: compiled code would take it out of its object and make a new one wherever it is said to be."""

EXPIRED_AT_ONCE: Final = 8192  # blocks
MAX_PREDICTED_BLOCKS: Final = 500_000


class _Run:
    """Blocks one after the other that `named` predictions name, all of them each. `rest` is what was cut off last."""

    __slots__ = ("keys", "named", "rest")

    def __init__(self, keys: tuple[Key, ...], named: int, rest: _Run | None) -> None:
        self.keys = keys
        self.named = named
        self.rest = rest


_Runs = dict[Key, _Run]
"""One slot's: every predicted block's key leads to the run that lists it."""


class Prediction:
    """One placed prompt's blocks on one slot."""

    __slots__ = ("alive", "blocks", "expires_s", "parts", "slot")

    def __init__(self, slot: int, blocks: int, expires_s: float) -> None:
        self.slot = slot
        self.blocks = blocks
        self.expires_s = expires_s
        self.alive = True
        self.parts: list[tuple[_Run, int]] = []
        """Runs and how many blocks they had; what was cut off since is their `rest`."""


class PredictedBlocks:
    """Predicted blocks per slot, with a time to live. Keys are chains of hashes: each commits to all before it."""

    def __init__(self, ttl_s: float, max_blocks: int = MAX_PREDICTED_BLOCKS) -> None:
        self.ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._slots: dict[int, _Runs] = {}
        self._queue: deque[Prediction] = deque()
        self._blocks = 0

    def add(self, slot: int, keys: Sequence[Key], now_s: float) -> Prediction | None:
        """Predicts `keys` on `slot`; None when prediction is off or there is nothing to predict."""
        count = len(keys)
        if self.ttl_s <= 0 or not count or count > self._max_blocks:
            return None
        self.expire(now_s)
        while self._blocks + count > self._max_blocks and self._queue:
            self.drop(self._queue.popleft())
        runs = self._slots.get(slot)
        if runs is None:
            runs = self._slots[slot] = {}
        prediction = Prediction(slot, count, now_s + self.ttl_s)
        position = 0
        while position < count:
            run = runs.get(keys[position])
            run = _begin(runs, keys, position) if run is None else _join(runs, run, keys, position)
            prediction.parts.append((run, len(run.keys)))
            position += len(run.keys)
        self._queue.append(prediction)
        self._blocks += count
        return prediction

    def drop(self, prediction: Prediction) -> None:
        """The request failed or the time is over: its blocks are no longer expected."""
        if not prediction.alive:
            return
        prediction.alive = False
        self._blocks -= prediction.blocks
        runs = self._slots[prediction.slot]
        for first, left in prediction.parts:
            before: _Run | None = None
            run: _Run | None = first
            while left and run is not None:
                left -= len(run.keys)
                run.named -= 1
                if not run.named:
                    for key in run.keys:
                        del runs[key]
                    if before is not None:  # whoever names what is left of it ends there
                        before.rest = None
                before, run = run, run.rest
        prediction.parts = []
        if not runs:
            del self._slots[prediction.slot]

    def expire(self, now_s: float) -> None:
        """Forgets what is over; of a great many long prompts at once, some at the next call (1 ms for 8,192 blocks)."""
        queue = self._queue
        left = EXPIRED_AT_ONCE
        while left > 0 and queue and (queue[0].expires_s <= now_s or not queue[0].alive):
            prediction = queue.popleft()
            left -= prediction.blocks if prediction.alive else 1
            self.drop(prediction)

    def extend(self, keys: Sequence[Key], found: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
        """(slot, blocks) of the slots on which predictions lengthen the prefix of `keys`. `found` has the confirmed
        depths by slot, the last of each being that of all tiers."""
        longer: list[tuple[int, int]] = []
        limit = len(keys)
        for slot, runs in self._slots.items():
            confirmed = found.get(slot)
            depth = confirmed[-1] if confirmed is not None else 0
            if depth == limit:
                continue
            run = runs.get(keys[depth])
            if run is None:
                continue
            while run is not None:
                depth = _end_of(run.keys, keys, depth)
                run = runs.get(keys[depth]) if depth < limit else None
            longer.append((slot, depth))
        return longer

    def __len__(self) -> int:
        return self._blocks


def _begin(runs: _Runs, keys: Sequence[Key], position: int) -> _Run:
    """A run of the blocks from `position` on that nobody predicted yet."""
    rest = keys[position:] if position else keys
    run = _Run(tuple(rest), 1, None)
    fresh = dict.fromkeys(rest, run)
    if len(fresh) < len(rest) or not runs.keys().isdisjoint(fresh):
        seen: dict[Key, None] = {}
        for key in rest:  # up to what is known, or named twice (only what is no chain names a block twice)
            if key in runs or key in seen:
                break
            seen[key] = None
        run.keys = tuple(seen)
        fresh = dict.fromkeys(seen, run)
    runs.update(fresh)
    return run


def _join(runs: _Runs, run: _Run, keys: Sequence[Key], position: int) -> _Run:
    """The run of the blocks from `position` on, of which the first is in `run`, named once more."""
    start = run.keys.index(keys[position])
    if start:
        run = _cut(runs, run, start)
    members = run.keys
    window = tuple(keys[position : position + len(members)])
    if window != members:
        length = 1
        while length < len(window) and members[length] == window[length]:
            length += 1
        _cut(runs, run, length)
    run.named += 1
    return run


def _cut(runs: _Runs, run: _Run, at: int) -> _Run:
    """Takes the blocks from `at` on off the run; they are a run of their own now, which is returned."""
    rest = run.rest = _Run(run.keys[at:], run.named, run.rest)
    run.keys = run.keys[:at]
    runs.update(dict.fromkeys(rest.keys, rest))
    return rest


def _end_of(members: tuple[Key, ...], keys: Sequence[Key], depth: int) -> int:
    """Where the run's blocks end among `keys`, of which the one at `depth` is in the run. Both are chains, so that what
    is equal somewhere is equal up to there."""
    first = keys[depth]
    shift = depth if members[0] == first else depth - members.index(first)
    end = shift + len(members)
    if end <= len(keys) and members[-1] == keys[end - 1]:
        return end
    low, high = depth, min(end, len(keys))  # equal at `low`, and not at `high` or not known to be
    while low < high - 1:
        middle = (low + high) // 2
        if members[middle - shift] == keys[middle]:
            low = middle
        else:
            high = middle
    return low + 1

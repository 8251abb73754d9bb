"""Blocks a rank will hold soon: prompts routed there whose events have not come yet (public case 53).

Short-lived and bounded. Confirmed blocks live in the index; this only bridges the time between a placement and the
BlockStored that follows its prefill, so that siblings of a burst meet on one rank.

A slot's blocks are kept in runs, pieces of prompts of which each prediction names a beginning. What a prompt shares
with others costs a step a run, not one a block, and a conversation that grows turn by turn stays one run.
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
    """Blocks one after the other. `named`: how many predictions name its first so many blocks; the longest beginning is
    all of it. `rest` is what was cut off at `cut`: predictions made before, of more than that, go on there."""

    __slots__ = ("cut", "keys", "named", "rest")

    def __init__(self) -> None:
        self.keys: tuple[Key, ...] = ()
        self.named: dict[int, int] = {}
        self.rest: _Run | None = None
        self.cut = 0


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
        """Runs and how many of their first blocks it names."""


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
            if run is None:
                run = _Run()
                named = _lengthen(runs, run, keys[position:])
            else:
                start = run.keys.index(keys[position])
                if start:
                    run = _cut(runs, run, start)
                end = _end_of(run.keys, keys, position)
                named = end - position
                if named == len(run.keys) and end < count and run.rest is None and keys[end] not in runs:
                    named += _lengthen(runs, run, keys[end:])
            run.named[named] = run.named.get(named, 0) + 1
            prediction.parts.append((run, named))
            position += named
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
        for run, named in prediction.parts:
            while run.rest is not None and named > run.cut:
                _give_up(runs, run, run.cut)
                run, named = run.rest, named - run.cut
            _give_up(runs, run, named)
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


def _lengthen(runs: _Runs, run: _Run, keys: Sequence[Key]) -> int:
    """Adds blocks that follow the run to it, up to one that is predicted already. Returns how many, at least one."""
    fresh = dict.fromkeys(keys, run)
    if not runs.keys().isdisjoint(keys):
        count = 1
        while keys[count] not in runs:
            count += 1
        fresh = dict.fromkeys(keys[:count], run)
    runs.update(fresh)
    run.keys += tuple(fresh)
    return len(fresh)


def _cut(runs: _Runs, run: _Run, at: int) -> _Run:
    """Takes the blocks from `at` on off the run; they are a run of their own now, which is returned."""
    rest = _Run()
    rest.keys, rest.rest, rest.cut = run.keys[at:], run.rest, run.cut - at
    run.keys, run.rest, run.cut = run.keys[:at], rest, at
    named = run.named
    rest.named = {end - at: count for end, count in named.items() if end > at}
    run.named = {end: count for end, count in named.items() if end < at}
    run.named[at] = named.get(at, 0) + sum(rest.named.values())
    runs.update(dict.fromkeys(rest.keys, rest))
    return rest


def _give_up(runs: _Runs, run: _Run, named: int) -> None:
    """One prediction less names the run's first `named` blocks."""
    count = run.named.pop(named)
    if count > 1:
        run.named[named] = count - 1
    elif named == len(run.keys):
        left = max(run.named) if run.named else 0
        for key in run.keys[left:]:
            del runs[key]
        run.keys = run.keys[:left]


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

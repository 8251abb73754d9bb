"""The blocks of one tier and who holds each, kept in runs. Pure.

A run is a piece of a chain, at most a few hundred blocks that came one after the other, whose blocks have exactly the
same holders: one mask, with one bit a holder. A table leads from each block's key to its run. That costs a block hardly
more than a mask of its own would, and what happens to blocks together costs one step: a second rank stores what another
one has, a node is evicted, a prompt's prefix is looked up. When a part of a run gets or loses a holder, the run is cut.

Exactness of `walk` rests on two facts. Every key leads to the one run that lists it, so a run whose keys equal the next
keys asked for stands for all of them. And what is asked for is a chain of hashes, each of which commits to all before
it: once a run was found equal to such a chain it IS one, and from then on its last key alone says that they are equal.
Nothing is believed that an event says about its blocks' order.

The tables are split into shards by key, so that no single dict ever grows large enough for its resize to stall the
event loop (one dict: 60 ms at 2.8M entries, 235 ms at 5.6M).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from router.index.run import Run as Run

# Measured (16 random keys an event, 1M resident): 64 shards store as fast as 8 and only a tenth slower than one dict;
# 256 shards cost a third more (cache misses).
# A key's top six bits pick its shard: -32..31, of which a Python list takes the negative ones from its end.
SHARDS: Final = 64
SHARD_SHIFT: Final = 58
MAX_RUN_BLOCKS = 256
# Fewer fresh blocks than this lengthen the run they follow (SGLang ≤ 0.5.16 sends one page an event).
_SHORT: Final = 8
# A dict that just grew takes up to 61 bytes an entry; beyond this one it is mostly holes.
_SPARSE_BYTES_PER_ENTRY = 128
_SPARSE_BYTES = 4096
# What deleting a key costs `sweep`, in looks at a run; and how many bytes are given back for one look.
_DELETE_COST = 6
_FREED_BYTES_PER_LOOK = 512


class RunTable:
    """`entries` counts the blocks that anybody holds. `intern` gives one object for equal masks."""

    def __init__(self, intern: Callable[[int], int]) -> None:
        self.entries = 0
        self._dead_runs = 0
        self._deleted = 0  # entries, since the last pass
        self._intern = intern
        self.shards: list[dict[int, Run]] = [{} for _ in range(SHARDS)]
        self._runs: list[Run] = []  # every run, in no order; those without keys are dead and leave with the next pass
        self._trimmed: dict[int, Run] = {}  # by holder: the run that what it lost last went to

    def mask(self, key: int) -> int:
        """Who holds this block."""
        run = self.shards[key >> SHARD_SHIFT].get(key)
        return 0 if run is None else run.mask

    def runs_of(self, bit: int, position: int, budget: int) -> tuple[int, list[tuple[int, ...]]]:
        """See PrefixIndex."""
        end = position + budget
        found = [run.keys for run in self._runs[position:end] if run.mask & bit and run.keys]
        return end if end < len(self._runs) else -1, found

    # Getting holders.

    def add(self, bit: int, keys: Sequence[int], parent: int | None = None) -> list[int]:
        """`bit` holds these blocks now, which follow `parent`. Returns those it held before, once per mention."""
        count = len(keys)
        if count < _SHORT:
            return self._join(bit, keys, parent)
        if count > MAX_RUN_BLOCKS:
            held: list[int] = []
            for start in range(0, count, MAX_RUN_BLOCKS):
                held += self.add(bit, keys[start : start + MAX_RUN_BLOCKS])
            return held
        first = keys[0]
        if first in self.shards[first >> SHARD_SHIFT]:
            return self._join(bit, keys, parent)
        members = tuple(keys)
        run = Run(bit, members)
        self._runs.append(run)
        shards = self.shards
        for key in members:  # most of what an event costs
            shard = shards[key >> SHARD_SHIFT]
            if key in shard:
                break
            shard[key] = run
        else:
            self.entries += count
            return []
        # This one belongs to another run, or is named twice.
        fresh = members.index(key)
        if shard[key] is run:
            fresh = members.index(key, fresh + 1)
        run.keys = members[:fresh]
        self.entries += fresh
        return self._join(bit, keys[fresh:], keys[fresh - 1])

    def _join(self, bit: int, keys: Sequence[int], parent: int | None) -> list[int]:
        """`add` for few keys, or for keys of which some are known."""
        shards = self.shards
        held: list[int] = []
        count = len(keys)
        position = 0
        while position < count:
            key = keys[position]
            run = shards[key >> SHARD_SHIFT].get(key)
            if run is None:
                if count - position >= _SHORT:
                    return held + self.add(bit, keys[position:])
                self._lengthen(bit, key, parent)
                position += 1
            elif run.mask & bit:
                held.append(key)
                position += 1
            else:
                start, length = _stretch(run.keys, keys, position)
                mask = self._intern(run.mask | bit)
                into = self._run_that_ends(parent, mask, length) if length < len(run.keys) else None
                self._regroup(run, start, length, mask, into)
                position += length
            parent = keys[position - 1]
        return held

    def _lengthen(self, mask: int, key: int, parent: int | None) -> None:
        run = self._run_that_ends(parent, mask, 1)
        if run is None:
            run = Run(mask, (key,))
            self._runs.append(run)
        else:
            run.keys += (key,)
            run.is_chain = False
        self.shards[key >> SHARD_SHIFT][key] = run
        self.entries += 1

    def _run_that_ends(self, key: int | None, mask: int, more: int) -> Run | None:
        """The run of these holders that ends with `key` and has room for `more` blocks."""
        run = None if key is None else self.shards[key >> SHARD_SHIFT].get(key)
        if run is None or run.mask != mask or run.keys[-1] != key or len(run.keys) + more > MAX_RUN_BLOCKS:
            return None
        return run

    # Losing holders.

    def discard(self, bit: int, keys: Sequence[int]) -> int:
        """`bit` holds these blocks no more. Returns how many of them it held."""
        shards = self.shards
        removed = 0
        count = len(keys)
        position = 0
        while position < count:
            key = keys[position]
            run = shards[key >> SHARD_SHIFT].get(key)
            if run is None or not run.mask & bit:
                position += 1
                continue
            start, length = _stretch(run.keys, keys, position)
            rest = run.mask ^ bit
            if rest:
                self._give_up(bit, run, start, length, self._intern(rest))
            else:
                self._delete(run.keys[start : start + length])
                self._close_up(run, start, start + length)
            position += length
            removed += length
        return removed

    def _give_up(self, bit: int, run: Run, start: int, length: int, mask: int) -> None:
        """A chain is evicted from its end, maybe page by page: the pages join the run that the ones behind them went
        to."""
        into = None
        if length < len(run.keys):
            into = self._trimmed.get(bit)
            if into is not None and (
                into.mask != mask or not into.keys or len(into.keys) + length > MAX_RUN_BLOCKS or into is run
            ):
                into = None
        new = self._regroup(run, start, length, mask, into, in_front=True)
        if new is not run:
            self._trimmed[bit] = new

    def _delete(self, keys: Sequence[int]) -> None:
        shards = self.shards
        for key in keys:
            del shards[key >> SHARD_SHIFT][key]
        self.entries -= len(keys)
        self._deleted += len(keys)

    # Cutting.

    def _regroup(
        self, run: Run, start: int, length: int, mask: int, into: Run | None, *, in_front: bool = False
    ) -> Run:
        """`length` blocks of `run` have the holders `mask` now. They go to `into`, if given, or to a run of their own;
        a whole run just changes its mask. Returns the run they are in."""
        keys = run.keys
        if length == len(keys):
            run.mask = mask
            return run
        part = keys[start : start + length]
        if into is None:
            into = Run(mask, part, run.is_chain)
            self._runs.append(into)
        else:
            into.keys = part + into.keys if in_front else into.keys + part
            into.is_chain = False
        self._lead(part, into)
        self._close_up(run, start, start + length)
        return into

    def _close_up(self, run: Run, start: int, stop: int) -> None:
        """Its blocks from `start` to `stop` left the run."""
        before, after = run.keys[:start], run.keys[stop:]
        if before and after:
            stays, leaves = (before, after) if len(after) <= len(before) else (after, before)
            run.keys = stays
            other = Run(run.mask, leaves, run.is_chain)
            self._runs.append(other)
            self._lead(leaves, other)
        else:
            run.keys = before or after
            self._dead_runs += not run.keys

    def _lead(self, keys: Sequence[int], run: Run) -> None:
        shards = self.shards
        for key in keys:
            shards[key >> SHARD_SHIFT][key] = run

    # Looking up.

    def walk(self, keys: Sequence[int], alive: int) -> list[tuple[int, int]]:
        """(depth, those of `alive` whose prefix of `keys` ends there), depth > 0. `keys` is a chain of hashes."""
        shards = self.shards
        drops: list[tuple[int, int]] = []
        count = len(keys)
        position = 0
        while position < count:
            key = keys[position]
            run = shards[key >> SHARD_SHIFT].get(key)
            if run is None:
                break
            gone = alive & ~run.mask
            if gone:
                if position:
                    drops.append((position, gone))
                alive ^= gone
                if not alive:
                    return drops
            members = run.keys
            end = position + len(members)
            # Equal last keys at this distance: then this key is the run's first, since both are chains.
            if end == position + 1 or (run.is_chain and end <= count and members[-1] == keys[end - 1]):
                position = end
            else:
                position = self._end_of(run, keys, position)
        if position:
            drops.append((position, alive))
        return drops

    def stretch(self, keys: Sequence[int], position: int) -> tuple[int, int]:
        """(holders of keys[position], where the blocks end that have these holders for sure)."""
        key = keys[position]
        run = self.shards[key >> SHARD_SHIFT].get(key)
        return (0, position + 1) if run is None else (run.mask, self._end_of(run, keys, position))

    def _end_of(self, run: Run, keys: Sequence[int], position: int) -> int:
        """Where the blocks of `run` end among `keys`, of which the one at `position` is in the run."""
        members = run.keys
        if len(members) == 1:
            return position + 1
        window = tuple(keys[position : position + len(members)])
        if window == members:
            run.is_chain = True
            return position + len(members)
        start = 0 if members[0] == window[0] else members.index(window[0])
        length = min(len(members) - start, len(window))
        if run.is_chain and members[start + length - 1] == window[length - 1]:
            return position + length
        same = 1
        while same < length and members[start + same] == window[same]:
            same += 1
        if not run.is_chain and (start or same == 1 < length):
            # Stored in an order that is not the chain's: cut it out, or every look-up would search for each block.
            self._regroup(run, start, same, run.mask, None)
        return position + same

    # Giving memory back.

    @property
    def is_worn(self) -> bool:
        """Enough was deleted since the last pass for another one to pay."""
        return self._deleted > 1024 + self.entries // 4 or self._dead_runs > 1024 + len(self._runs) // 4

    def clean(self, doomed: int, position: int, budget: int) -> tuple[int, int]:
        """Take the bits `doomed` off the runs from `position` on. Returns (the next position, budget left); a position
        of -1: the end was reached. Runs made meanwhile come last, so none is missed."""
        runs = self._runs
        if not position:
            self._deleted = 0
        while budget > 0:
            if position >= len(runs):
                return -1, budget
            run = runs[position]
            budget -= 1
            if run.mask & doomed and run.keys:
                rest = run.mask & ~doomed
                if rest:
                    run.mask = self._intern(rest)
                else:
                    budget -= _DELETE_COST * len(run.keys)
                    self._delete(run.keys)
                    run.keys = ()
                    self._dead_runs += 1
            if run.keys:
                position += 1
                continue
            self._dead_runs -= 1
            last = runs.pop()
            if last is not run:
                runs[position] = last
        return position, budget

    def shrink(self, shard: int) -> int:
        """Rebuild a shard that is mostly holes; returns what it cost."""
        table = self.shards[shard]
        size = table.__sizeof__()
        if size <= _SPARSE_BYTES + _SPARSE_BYTES_PER_ENTRY * len(table):
            return 1
        self.shards[shard] = table = dict(list(table.items()))
        return 1 + len(table) + size // _FREED_BYTES_PER_LOOK


def _stretch(members: tuple[int, ...], keys: Sequence[int], position: int) -> tuple[int, int]:
    """(start, length) in `members` of the blocks that `keys` names from `position` on, forwards or backwards."""
    size = len(members)
    if size == 1:
        return 0, 1
    window = tuple(keys[position : position + size])
    if window == members or window[::-1] == members:
        return 0, size
    key = window[0]
    start = size - 1 if members[-1] == key else members.index(key)
    length = 1
    for ours, asked in zip(members[start + 1 :], window[1:], strict=False):
        if ours != asked:
            break
        length += 1
    if length > 1:
        return start, length
    for ours, asked in zip(members[:start][::-1], window[1:], strict=False):
        if ours != asked:
            break
        length += 1
    return start + 1 - length, length

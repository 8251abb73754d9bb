"""Which slot holds which block, and how far each slot holds a chain of blocks. Pure.

A slot is one (worker incarnation, rank). Every tier has a table (see `runs`) from block key to the block's holders, an
int with one bit a slot; equal masks are one object. Residency is a count (case 23): counts above one are rare and kept
apart, per slot.

A clear must not search millions of entries: it retires the slot's bit, gives the slot a fresh one, and `sweep` takes
the old bit off the runs in slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from router.contract.events import Tier
from router.index.runs import SHARD_SHIFT, SHARDS, RunTable

Depths = tuple[int, ...]
"""Four, one a tier. Of no stated length, so that compiled code keeps the object: see router.policy.decide.Credit."""
_NOTHING: Depths = (0, 0, 0, 0)

_TIERS = len(Tier)
# Blocks a slot may have stored since its last clear and still be cleared one by one, without retiring a bit: keeps
# masks short under a flood of clears (case 27).
_SMALL_SLOT_BLOCKS = 512
# More retired bits than this and a clear sweeps at once. Each of them stood for more than _SMALL_SLOT_BLOCKS stores.
_MAX_RETIRED_BITS = 256
_MAX_INTERNED_MASKS = 65_536
_MAX_SPLIT_MASKS = 4096


class _Slot:
    __slots__ = ("bit", "blocks", "extra", "recent", "recent_blocks")

    def __init__(self, bit: int) -> None:
        self.bit = bit  # the mask, 1 << position
        self.blocks = [0] * _TIERS
        self.extra: list[dict[int, int]] = [{} for _ in range(_TIERS)]  # copies above the first
        self.recent: list[tuple[Tier, Sequence[int]]] | None = []
        self.recent_blocks = 0


class PrefixIndex:
    """Residency counts of blocks per (slot, tier), and the longest contiguous prefix of a chain per slot.

    `max_blocks` bounds the distinct blocks of all tiers, `max_blocks_per_slot` those of one slot; what goes beyond is
    refused (cases 9, 104). Keys are signed 64-bit ints. A key list handed to `store` must not be changed afterwards.
    """

    def __init__(self, max_blocks: int = 50_000_000, max_blocks_per_slot: int = 10_000_000) -> None:
        self.max_blocks = max_blocks
        self.max_blocks_per_slot = max_blocks_per_slot
        self._tables = [RunTable(self._intern) for _ in Tier]
        self._slots: dict[int, _Slot] = {}
        self._next_slot = 0
        self._live = 0  # bits of all open slots
        self._slot_of_bit: dict[int, int] = {}
        self._free_bits: list[int] = []
        self._bits_made = 0
        self._retired = 0
        self._retired_count = 0
        self._sweeping = 0  # the retired bits the pass under way removes
        self._pass: _Pass | None = None
        self._masks: dict[int, int] = {}
        self._split: dict[int, tuple[int, ...]] = {}
        self._discarded: deque[dict[Any, Any]] = deque()
        self._room = max_blocks  # blocks that can be stored before the cap must be looked at again

    @property
    def total_blocks(self) -> int:
        """Distinct (tier, block) entries in memory, those that wait for `sweep` included."""
        return sum(table.entries for table in self._tables)

    def open_slot(self) -> int:
        slot = self._next_slot
        self._next_slot += 1
        state = _Slot(self._take_bit(slot))
        self._slots[slot] = state
        return slot

    def blocks(self, slot: int) -> Depths:
        """Distinct resident blocks of the slot, per tier."""
        a, b, c, d = self._slots[slot].blocks
        return a, b, c, d

    def holds(self, slot: int, key: int) -> bool:
        """Whether the block is resident on the slot in any tier."""
        bit = self._slots[slot].bit
        for table in self._tables:
            if table.entries:
                run = table.shards[key >> SHARD_SHIFT].get(key)  # once an event: a call would cost as much again
                if run is not None and run.mask & bit:
                    return True
        return False

    def store(self, slot: int, tier: Tier, keys: Sequence[int], parent: int | None = None) -> int:
        """Count one more copy of every key. Returns how many blocks the caps refused.

        `parent` is the block before the first key's, if known. It only tells where short stores belong together: what
        is found does not depend on it, nor on the order of the keys.
        """
        state = self._slots[slot]
        count = len(keys)
        refused = 0
        if state.blocks[tier] + count > self.max_blocks_per_slot or count > self._room:
            refused = self._refused(state, tier, count)
            count -= refused
            keys = keys[:count]
        self._room -= count
        if state.recent is not None:
            state.recent_blocks += count
            if state.recent_blocks <= _SMALL_SLOT_BLOCKS:
                state.recent.append((tier, keys))
            else:
                state.recent = None
        held = self._tables[tier].add(state.bit, keys, parent)
        if held:
            extra = state.extra[tier]
            for key in held:
                extra[key] = extra.get(key, 0) + 1
        state.blocks[tier] += count - len(held)
        return refused

    def hold(self, slot: int, tier: Tier, keys: Sequence[int]) -> int:
        """As `store`, but a block the slot has already gets no further copy."""
        bit, table = self._slots[slot].bit, self._tables[tier]
        fresh = tuple(key for key in keys if not table.mask(key) & bit)
        return self.store(slot, tier, keys if len(fresh) == len(keys) else fresh)

    def runs_of(self, slot: int, tier: Tier, position: int, budget_runs: int) -> tuple[int, list[tuple[int, ...]]]:
        """The slot's blocks in that tier, run by run: looks at `budget_runs` runs from `position` on. Returns where to
        go on, -1 at the end. What other slots do between two calls may move a block behind or before the position."""
        return self._tables[tier].runs_of(self._slots[slot].bit, position, budget_runs)

    def copies(self, slot: int) -> list[tuple[Tier, int, int]]:
        """(tier, block, copies beyond the first)."""
        return [(tier, key, count) for tier in Tier for key, count in self._slots[slot].extra[tier].items()]

    def _refused(self, state: _Slot, tier: Tier, wanted: int) -> int:
        if self._retired and self.total_blocks + wanted > self.max_blocks:
            self._sweep_all()
        self._room = max(0, self.max_blocks - self.total_blocks)
        room = min(self.max_blocks_per_slot - state.blocks[tier], self._room)
        return max(0, wanted - max(0, room))

    def remove(self, slot: int, tier: Tier | None, keys: Sequence[int]) -> None:
        """Count one copy less of every key, in one tier or (None) in each. Unknown keys are nothing (case 24)."""
        state = self._slots[slot]
        for one in Tier if tier is None else (tier,):
            if state.blocks[one]:
                self._remove(state, one, keys)

    def _remove(self, state: _Slot, tier: Tier, keys: Sequence[int]) -> None:
        if state.extra[tier]:
            keys = _without_copies(state.extra[tier], keys)
        state.blocks[tier] -= self._tables[tier].discard(state.bit, keys)

    def clear(self, slot: int) -> None:
        """The slot holds nothing any more. Constant time, but for slots that hardly held anything."""
        state = self._slots[slot]
        if state.recent is not None:
            for copies in state.extra:
                copies.clear()
            for tier, keys in state.recent:
                self._remove(state, tier, keys)
            state.recent = []
            state.recent_blocks = 0
            return
        bit = state.bit
        self._slots[slot] = _Slot(self._take_bit(slot))
        self._retire(bit)
        for copies in state.extra:
            self.discard(copies)
        if self._retired_count > _MAX_RETIRED_BITS:
            self._sweep_all()

    def close_slot(self, slot: int) -> None:
        """Like `clear`, and the slot is gone: using it again raises KeyError."""
        self.clear(slot)
        self._retire(self._slots.pop(slot).bit)

    def match(self, keys: Sequence[int], limit_blocks: int | None = None) -> dict[int, Depths]:
        """How many of the first `keys` each slot holds without a hole, per tier: that tier or a faster one, so the
        numbers never fall from left to right. Slots without even the first block are absent."""
        if limit_blocks is not None and limit_blocks < len(keys):
            keys = keys[: max(0, limit_blocks)]
        found: dict[int, Depths] = {}
        tables: list[RunTable] = []
        for tier, table in enumerate(self._tables):
            if not table.entries:
                continue
            tables.append(table)
            one = len(tables) == 1
            for depth, bits in table.walk(keys, self._live) if one else _walk_together(tables, keys, self._live):
                depths: Depths = (depth, depth, depth, depth)
                for slot in self._slots_of(bits):
                    found[slot] = _from_tier(found.get(slot, _NOTHING), tier, depth) if tier else depths
        return found

    def _slots_of(self, bits: int) -> tuple[int, ...]:
        """The slots of a mask of live bits. The same few masks come again and again: remembered until a bit changes."""
        slots = self._split.get(bits)
        if slots is None:
            rest = bits
            found = []
            while rest:
                low = rest & -rest
                rest ^= low
                found.append(self._slot_of_bit[low])
            slots = tuple(found)
            if len(self._split) >= _MAX_SPLIT_MASKS:
                self._split.clear()
            self._split[bits] = slots
        return slots

    def discard(self, mapping: dict[Any, Any]) -> None:
        """Take a dict nobody uses any more, to be freed by `sweep` in slices instead of in one long pause."""
        if mapping:
            self._discarded.append(mapping)

    def sweep(self, budget_blocks: int) -> bool:
        """Give memory of cleared, closed and removed blocks back: looks at about `budget_blocks` entries and returns
        whether there is more to do. Call it again and again from an idle moment; a pass without work costs nothing."""
        left = budget_blocks
        while self._discarded and left > 0:
            mapping = self._discarded[0]
            count = min(left, len(mapping))
            for _ in range(count):
                mapping.popitem()
            left -= count
            if not mapping:
                self._discarded.popleft()
        if self._pass is None and (self._retired or any(table.is_worn for table in self._tables)):
            self._sweeping = self._retired
            self._pass = _Pass()
        while self._pass is not None and left > 0:
            left = self._go_on(self._pass, left)
        return self._pass is not None or bool(self._retired) or bool(self._discarded)

    def _go_on(self, sweep: _Pass, budget: int) -> int:
        """One step of a pass; returns what is left of the budget."""
        table = self._tables[sweep.tier]
        if sweep.run >= 0:
            sweep.run, left = table.clean(self._sweeping, sweep.run, budget)
            return left
        left = budget - table.shrink(sweep.shard)
        sweep.shard += 1
        if sweep.shard == SHARDS:
            sweep.tier, sweep.run, sweep.shard = sweep.tier + 1, 0, 0
            if sweep.tier == _TIERS:
                self._end_pass()
        return left

    def _sweep_all(self) -> None:
        """Finish the pass under way, then one more: every bit retired by now is free after that."""
        while self._retired or self._pass is not None:
            self.sweep(1 << 62)

    def _end_pass(self) -> None:
        self._pass = None
        self._retired ^= self._sweeping
        self._retired_count -= self._sweeping.bit_count()
        while self._sweeping:
            low = self._sweeping & -self._sweeping
            self._sweeping ^= low
            self._free_bits.append(low)
        self._free_bits.sort(reverse=True)  # low bits first: masks stay short

    def _intern(self, mask: int) -> int:
        masks = self._masks
        if len(masks) > _MAX_INTERNED_MASKS:
            masks.clear()  # only sharing is lost: the tables keep the objects they use
        return masks.setdefault(mask, mask)

    def _take_bit(self, slot: int) -> int:
        if self._free_bits:
            bit = self._free_bits.pop()
        else:
            bit = 1 << self._bits_made
            self._bits_made += 1
        self._live |= bit
        self._slot_of_bit[bit] = slot
        self._split.clear()
        return bit

    def _retire(self, bit: int) -> None:
        self._live ^= bit
        del self._slot_of_bit[bit]
        self._split.clear()
        self._retired |= bit
        self._retired_count += 1


class _Pass:
    """How far a pass over all tables is: through a table's runs (-1: done), then through its shards."""

    __slots__ = ("run", "shard", "tier")

    def __init__(self) -> None:
        self.tier = 0
        self.run = 0
        self.shard = 0


def _walk_together(tables: Sequence[RunTable], keys: Sequence[int], alive: int) -> list[tuple[int, int]]:
    """`RunTable.walk` over what is held in any of the tables."""
    drops: list[tuple[int, int]] = []
    masks = [0] * len(tables)
    ends = [0] * len(tables)
    position = 0
    while position < len(keys) and alive:
        for number, table in enumerate(tables):
            if ends[number] <= position:
                masks[number], ends[number] = table.stretch(keys, position)
        holders = 0
        for mask in masks:
            holders |= mask
        gone = alive & ~holders
        if gone:
            if position:
                drops.append((position, gone))
            alive ^= gone
        position = min(ends)
    if alive and position:
        drops.append((position, alive))
    return drops


def _without_copies(extra: dict[int, int], keys: Sequence[int]) -> list[int]:
    """The keys whose last copy goes; of the others `extra` has one less."""
    last = []
    for key in keys:
        copies = extra.get(key, 0)
        if not copies:
            last.append(key)
        elif copies == 1:
            del extra[key]
        else:
            extra[key] = copies - 1
    return last


def _from_tier(depths: Depths, tier: int, depth: int) -> Depths:
    """`depths` with `depth` in this tier, which is not the first, and in every slower one."""
    a, b, c, _ = depths
    if tier == 1:
        return a, depth, depth, depth
    return (a, b, depth, depth) if tier == 2 else (a, b, c, depth)

"""Which slot holds which block, and how far each slot holds a chain of blocks. Pure.

A slot is one (worker incarnation, rank). Every tier has a table from block key to a holder mask, an int with one bit a
slot; equal masks are one object, so a block that a hundred ranks hold costs one table entry. Residency is a count (case
23): counts above one are rare and kept apart, per slot.

A clear must not search millions of entries: it retires the slot's bit, gives the slot a fresh one, and `sweep` removes
the old bit from the tables in slices. The tables are split into shards by key, so that a slice is a few shards, and so
that no single dict ever grows large enough for its resize to stall the event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from router.contract.events import Tier

Depths = tuple[int, int, int, int]
_NOTHING: Depths = (0, 0, 0, 0)

# Measured (16 random keys an event, 1M resident): 64 shards store as fast as 8 and only a tenth slower than one dict,
# whose resize stalls 60 ms at 2.8M and 235 ms at 5.6M entries; 256 shards cost a third more (cache misses).
# A key's top six bits pick its shard: -32..31, of which a Python list takes the negative ones from its end.
_SHARDS = 64
_SHARD_SHIFT = 58
_TIERS = len(Tier)
# Blocks a slot may have stored since its last clear and still be cleared one by one, without retiring a bit: keeps
# masks short under a flood of clears (case 27).
_SMALL_SLOT_BLOCKS = 512
# More retired bits than this and a clear sweeps at once. Each of them stood for more than _SMALL_SLOT_BLOCKS stores.
_MAX_RETIRED_BITS = 256
_MAX_INTERNED_MASKS = 65_536
_MAX_SPLIT_MASKS = 4096
# A dict that just grew takes up to 61 bytes an entry; beyond this one it is mostly holes.
_SPARSE_BYTES_PER_ENTRY = 128
_SPARSE_BYTES = 4096
# Python keeps one object for each int up to 256; `store` needs masks that can be told apart by identity.
_FIRST_BIT = 10
# Events of fewer blocks (SGLang ≤ 0.5.16 sends one page an event) share the slot's mask object, to save memory.
_BULK_BLOCKS = 8
_CHUNK = 128


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
        self._tables: list[list[dict[int, int]]] = [[{} for _ in range(_SHARDS)] for _ in range(_TIERS)]
        self._setdefaults = [[table.setdefault for table in tables] for tables in self._tables]
        self._entries = [0] * _TIERS
        self._total = 0
        self._slots: dict[int, _Slot] = {}
        self._next_slot = 0
        self._live = 0  # bits of all open slots
        self._slot_of_bit: dict[int, int] = {}
        self._free_bits: list[int] = []
        self._bits_made = _FIRST_BIT
        self._retired = 0
        self._retired_count = 0
        self._sweeping = 0  # the retired bits the pass under way removes
        self._position: int | None = None  # next shard of that pass
        self._removed = 0  # entries deleted since the last pass
        self._masks: dict[int, int] = {}
        self._split: dict[int, tuple[int, ...]] = {}
        self._discarded: deque[dict[Any, Any]] = deque()

    @property
    def total_blocks(self) -> int:
        """Distinct (tier, block) entries in memory, those that wait for `sweep` included."""
        return self._total

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
        shard = key >> _SHARD_SHIFT
        for tier, entries in enumerate(self._entries):
            if entries and self._tables[tier][shard].get(key, 0) & bit:
                return True
        return False

    def store(self, slot: int, tier: Tier, keys: Sequence[int]) -> int:
        """Count one more copy of every key. Returns how many blocks the caps refused."""
        state = self._slots[slot]
        count = len(keys)
        refused = 0
        if state.blocks[tier] + count > self.max_blocks_per_slot or self._total + count > self.max_blocks:
            refused = self._refused(state, tier, count)
            count -= refused
            keys = keys[:count]
        if state.recent is not None:
            state.recent_blocks += count
            if state.recent_blocks <= _SMALL_SLOT_BLOCKS:
                state.recent.append((tier, keys))
            else:
                state.recent = None
        if count < _BULK_BLOCKS:
            self._store_each(state, tier, keys)
            return refused
        # One dict operation a key: an int object of this event's own comes back from setdefault only where it went in.
        mine = state.bit + 0
        setdefaults = self._setdefaults[tier]
        present = [key for key in keys if setdefaults[key >> _SHARD_SHIFT](key, mine) is not mine]
        fresh = count - len(present)
        if len({*keys}) != count:
            # A key named twice in one event went in with its first mention; the others are further copies.
            once = set(keys).difference(present)
            present = list(keys)
            for key in once:
                present.remove(key)
            fresh = len(once)
        state.blocks[tier] += fresh
        self._entries[tier] += fresh
        self._total += fresh
        if present:
            self._store_each(state, tier, present)
        return refused

    def _store_each(self, state: _Slot, tier: Tier, keys: Sequence[int]) -> None:
        bit = state.bit
        tables = self._tables[tier]
        fresh = shared = 0
        for key in keys:
            table = tables[key >> _SHARD_SHIFT]
            mask = table.get(key)
            if mask is None:
                table[key] = bit
                fresh += 1
            elif mask & bit:
                extra = state.extra[tier]
                extra[key] = extra.get(key, 0) + 1
            else:
                table[key] = self._intern(mask | bit)
                shared += 1
        state.blocks[tier] += fresh + shared
        self._entries[tier] += fresh
        self._total += fresh

    def _refused(self, state: _Slot, tier: Tier, wanted: int) -> int:
        if self._retired and self._total + wanted > self.max_blocks:
            self._sweep_all()
        room = min(self.max_blocks_per_slot - state.blocks[tier], self.max_blocks - self._total)
        return max(0, wanted - max(0, room))

    def remove(self, slot: int, tier: Tier | None, keys: Sequence[int]) -> None:
        """Count one copy less of every key, in one tier or (None) in each. Unknown keys are nothing (case 24)."""
        state = self._slots[slot]
        for one in Tier if tier is None else (tier,):
            if state.blocks[one]:
                self._remove(state, one, keys)

    def _remove(self, state: _Slot, tier: Tier, keys: Sequence[int]) -> None:
        bit = state.bit
        extra = state.extra[tier]
        tables = self._tables[tier]
        removed = deleted = 0
        for key in keys:
            if extra and key in extra:
                if extra[key] == 1:
                    del extra[key]
                else:
                    extra[key] -= 1
                continue
            table = tables[key >> _SHARD_SHIFT]
            mask = table.get(key, 0)
            if not mask & bit:
                continue
            removed += 1
            if mask == bit:
                del table[key]
                deleted += 1
            else:
                table[key] = self._intern(mask ^ bit)
        state.blocks[tier] -= removed
        self._entries[tier] -= deleted
        self._total -= deleted
        self._removed += deleted

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
        tiers: list[list[dict[int, int]]] = []
        for tier in Tier:
            if self._entries[tier]:
                tiers.append(self._tables[tier])
                for depth, bits in self._walk(tiers, keys):
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

    def _walk(self, tiers: list[list[dict[int, int]]], keys: Sequence[int]) -> list[tuple[int, int]]:
        """(depth, bits of the slots whose prefix ends there), depth > 0. Exact: every key is looked at until no slot is
        left, so a hole anywhere ends the prefix of whom it concerns."""
        alive = self._live
        drops: list[tuple[int, int]] = []
        last: int | None = None
        for start in range(0, len(keys), _CHUNK):
            masks = self._masks_of(tiers, keys[start : start + _CHUNK])
            if last is not None and masks.count(last) == len(masks):
                continue  # equal masks are mostly one object: whoever is alive holds all of these too
            last = masks[-1]
            # Few masks are distinct: whoever lacks a block of this chunk shows in one of them, first where it stands.
            for offset, lacking in sorted(
                [(masks.index(mask), gone) for mask in {*masks} if (gone := alive & mask ^ alive)]
            ):
                gone = lacking & alive
                if gone:
                    alive ^= gone
                    if start + offset:
                        drops.append((start + offset, gone))
            if not alive:
                return drops
        if keys:
            drops.append((len(keys), alive))
        return drops

    def _masks_of(self, tiers: list[list[dict[int, int]]], keys: Sequence[int]) -> list[int]:
        tables = tiers[0]
        try:  # a third faster than get(); fails once a walk, where the prefix that anybody holds ends
            masks = [tables[key >> _SHARD_SHIFT][key] for key in keys]
        except KeyError:
            masks = [tables[key >> _SHARD_SHIFT].get(key, 0) for key in keys]
        for tables in tiers[1:]:
            masks = [mask | tables[key >> _SHARD_SHIFT].get(key, 0) for mask, key in zip(masks, keys, strict=True)]
        return masks

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
        if self._position is None and (self._retired or self._removed > 1024 + self._total // 4):
            self._begin_pass()
        while self._position is not None and left > 0:
            tier, shard = divmod(self._position, _SHARDS)
            left -= 1 + len(self._tables[tier][shard])
            self._sweep_shard(Tier(tier), shard)
            self._position += 1
            if self._position == _TIERS * _SHARDS:
                self._end_pass()
        return self._position is not None or bool(self._retired) or bool(self._discarded)

    def _sweep_all(self) -> None:
        """Finish the pass under way, then one more: every bit retired by now is free after that."""
        while self._retired or self._position is not None:
            self.sweep(1 << 62)

    def _begin_pass(self) -> None:
        self._position = 0
        self._sweeping = self._retired
        self._removed = 0

    def _end_pass(self) -> None:
        self._position = None
        self._retired ^= self._sweeping
        self._retired_count -= self._sweeping.bit_count()
        while self._sweeping:
            low = self._sweeping & -self._sweeping
            self._sweeping ^= low
            self._free_bits.append(low)
        self._free_bits.sort(reverse=True)  # low bits first: masks stay short

    def _sweep_shard(self, tier: Tier, shard: int) -> None:
        tables = self._tables[tier]
        table = tables[shard]
        doomed = self._sweeping
        if doomed:
            for key, mask in [item for item in table.items() if item[1] & doomed]:
                rest = mask & ~doomed
                if rest:
                    table[key] = self._intern(rest)
                else:
                    del table[key]
                    self._entries[tier] -= 1
                    self._total -= 1
        if table.__sizeof__() > _SPARSE_BYTES + _SPARSE_BYTES_PER_ENTRY * len(table):
            tables[shard] = table = dict(list(table.items()))
            self._setdefaults[tier][shard] = table.setdefault

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


def _from_tier(depths: Depths, tier: Tier, depth: int) -> Depths:
    """`depths` with `depth` in this tier, which is not the first, and in every slower one."""
    a, b, c, _ = depths
    if tier == 1:
        return a, depth, depth, depth
    return (a, b, depth, depth) if tier == 2 else (a, b, c, depth)

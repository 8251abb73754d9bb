"""The index against a naive model, its costs in calls and in memory, and its caps."""

from __future__ import annotations

import gc
import random
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.contract.events import Tier
from router.index import prefix
from router.index.prefix import Depths, PrefixIndex
from router.index.runs import Run

TIERS = st.sampled_from(Tier)
# Few keys, spread over all shards and both signs, so that duplicates, holes and shared blocks are common.
KEYS = [((n * 0x9E3779B97F4A7C15) % 2**64) - 2**63 for n in range(40)]
# A prompt's keys are a chain. Three of them that part after 5 and after 15 blocks, and one that shares nothing.
CHAINS = [KEYS[:24], KEYS[:5] + KEYS[24:30], KEYS[:15] + KEYS[30:34], KEYS[34:]]
PARTS = st.builds(
    lambda chain, start, length, step: chain[start : start + length][::step],
    st.sampled_from(CHAINS),
    st.integers(0, 23),
    st.integers(0, 24),
    st.sampled_from([1, 1, 1, 2, -1]),
)
KEY_LISTS = PARTS | PARTS | st.lists(st.sampled_from(KEYS), max_size=24)
Model = dict[int, dict[Tier, Counter[int]]]


def expected_match(model: Model, keys: list[int]) -> dict[int, Depths]:
    found: dict[int, Depths] = {}
    for slot, tiers in model.items():
        depths = []
        for tier in Tier:
            faster = [tiers[t] for t in Tier if t <= tier]
            depth = 0
            while depth < len(keys) and any(counts[keys[depth]] for counts in faster):
                depth += 1
            depths.append(depth)
        if any(depths):
            found[slot] = (depths[0], depths[1], depths[2], depths[3])
    return found


def shards_of(index: PrefixIndex) -> Iterator[dict[int, Run]]:
    for table in index._tables:
        yield from table.shards


def check_runs(index: PrefixIndex) -> None:
    """Every key leads to the one run that lists it, every run is on the list that `sweep` goes through."""
    for table in index._tables:
        listed = [key for run in table._runs for key in run.keys]
        led = {key: run for shard in table.shards for key, run in shard.items()}
        assert len(listed) == len(led) == table.entries
        assert all(key in led and led[key] is run for run in table._runs for key in run.keys)
        assert all(run.mask for run in led.values())
        assert sum(not run.keys for run in table._runs) == table._dead_runs


class IndexAgainstModel(RuleBasedStateMachine):
    @initialize(small=st.booleans())
    def start(self, small: bool) -> None:
        self.index = PrefixIndex()
        self.model: Model = {}
        self.small = small

    def pick(self, number: int) -> int | None:
        slots = sorted(self.model)
        return slots[number % len(slots)] if slots else None

    @rule()
    def open_slot(self) -> None:
        if len(self.model) < 6:
            slot = self.index.open_slot()
            assert slot not in self.model
            self.model[slot] = {tier: Counter() for tier in Tier}

    @rule(number=st.integers(0, 9), tier=TIERS, keys=KEY_LISTS, parent=st.none() | st.sampled_from(KEYS))
    def store(self, number: int, tier: Tier, keys: list[int], parent: int | None) -> None:
        if (slot := self.pick(number)) is not None:
            assert self.index.store(slot, tier, keys, parent) == 0
            self.model[slot][tier].update(keys)

    @rule(number=st.integers(0, 9), tier=st.none() | TIERS, keys=KEY_LISTS)
    def remove(self, number: int, tier: Tier | None, keys: list[int]) -> None:
        if (slot := self.pick(number)) is not None:
            self.index.remove(slot, tier, keys)
            for one in Tier if tier is None else (tier,):
                for key in keys:
                    if self.model[slot][one][key]:
                        self.model[slot][one][key] -= 1

    @rule(number=st.integers(0, 9))
    def clear(self, number: int) -> None:
        if (slot := self.pick(number)) is not None:
            if not self.small:  # as after more stores than are cleared one by one
                self.index._slots[slot].recent = None
            self.index.clear(slot)
            self.model[slot] = {tier: Counter() for tier in Tier}

    @rule(number=st.integers(0, 9))
    def close(self, number: int) -> None:
        if (slot := self.pick(number)) is not None:
            self.index.close_slot(slot)
            del self.model[slot]

    @rule(budget=st.integers(1, 200))
    def sweep(self, budget: int) -> None:
        self.index.sweep(budget)

    @rule(keys=st.sampled_from(CHAINS), limit=st.none() | st.integers(0, 24))
    def match(self, keys: list[int], limit: int | None) -> None:
        assert self.index.match(keys, limit) == expected_match(self.model, keys if limit is None else keys[:limit])

    @invariant()
    def counts_are_those_of_the_model(self) -> None:
        if not hasattr(self, "model"):
            return
        check_runs(self.index)
        for slot, tiers in self.model.items():
            assert self.index.blocks(slot) == tuple(sum(1 for n in tiers[tier].values() if n) for tier in Tier)
            assert [key for key in KEYS if self.index.holds(slot, key)] == [
                key for key in KEYS if any(tiers[tier][key] for tier in Tier)
            ]

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        for slot in self.model:
            self.index.close_slot(slot)
        while self.index.sweep(50):
            pass
        assert self.index.total_blocks == 0
        assert not any(shards_of(self.index))
        assert self.index._retired == self.index._live == 0


IndexAgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_index_against_model = IndexAgainstModel.TestCase


@given(st.integers(0, 2**32), st.integers(1, 90), st.integers(1, 400))
@settings(max_examples=30, deadline=None)
def test_long_chains_with_holes_are_matched_exactly(seed: int, slots: int, blocks: int) -> None:
    """Far longer than a chunk of the walk, with more slots than bits in a word."""
    rng = random.Random(seed)
    index = PrefixIndex()
    chain = [rng.getrandbits(64) - 2**63 for _ in range(blocks)]
    model: Model = {}
    for _ in range(slots):
        slot = index.open_slot()
        held = rng.randrange(blocks + 1)
        holes = set(rng.sample(range(blocks), min(blocks, rng.choice([0, 0, 1, 3]))))
        tier = rng.choice([Tier.GPU, Tier.GPU, Tier.GPU, Tier.DISK])
        keys = [key for n, key in enumerate(chain[:held]) if n not in holes]
        for start in range(0, len(keys), 16):
            index.store(slot, tier, keys[start : start + 16])
        model[slot] = {t: Counter(keys if t is tier else ()) for t in Tier}
    assert index.match(chain) == expected_match(model, chain)


def test_a_duplicate_store_survives_the_first_removal() -> None:
    """Case 23."""
    index = PrefixIndex()
    slot = index.open_slot()
    for keys in ([1], [1], [2] * 9):
        index.store(slot, Tier.GPU, keys)
    index.remove(slot, Tier.GPU, [1, 2, 2])
    assert index.match([1, 2]) == {slot: (2, 2, 2, 2)}
    index.remove(slot, Tier.GPU, [1])
    assert index.match([1]) == {}
    index.remove(slot, Tier.GPU, [1, 1])
    assert index.blocks(slot) == (1, 0, 0, 0)


def test_removals_of_the_unknown_allocate_nothing() -> None:
    """Case 24: a million random hashes."""
    index = PrefixIndex()
    slot = index.open_slot()
    index.store(slot, Tier.GPU, [1])
    sizes = [shard.__sizeof__() for shard in shards_of(index)]
    rng = random.Random(1)
    for _ in range(100):
        index.remove(slot, None, [rng.getrandbits(64) - 2**63 for _ in range(10_000)])
    assert index.blocks(slot) == (1, 0, 0, 0)
    assert [shard.__sizeof__() for shard in shards_of(index)] == sizes


def test_a_flood_of_clears_keeps_masks_short() -> None:
    """Case 27: 10,000 clears with a store in between, and none of them searches the index."""
    index = PrefixIndex()
    other, slot = index.open_slot(), index.open_slot()
    index.store(other, Tier.GPU, list(range(20_000)))
    for n in range(10_000):
        index.store(slot, Tier.GPU, [7, 100_000 + n])
        index.clear(slot)
    assert index.match([7]) == {other: (1, 1, 1, 1)}
    assert index.total_blocks == 20_000
    assert max(run.mask for shard in shards_of(index) for run in shard.values()) < 2**16


def test_large_clears_without_sweeps_stay_bounded() -> None:
    index = PrefixIndex()
    slot = index.open_slot()
    for _ in range(prefix._MAX_RETIRED_BITS + 40):
        index.store(slot, Tier.GPU, list(range(prefix._SMALL_SLOT_BLOCKS + 1)))
        index.clear(slot)
    assert index._bits_made <= prefix._MAX_RETIRED_BITS + 3


def test_a_clear_concerns_one_slot_and_what_comes_after_it_stays() -> None:
    """Case 27."""
    index = PrefixIndex()
    one, two = index.open_slot(), index.open_slot()
    keys = list(range(2000))
    index.store(one, Tier.GPU, keys)
    index.store(two, Tier.GPU, keys)
    index.clear(two)
    index.store(two, Tier.GPU, keys[:5])
    for _ in range(3):
        assert index.match(keys) == {one: (2000,) * 4, two: (5,) * 4}
        assert index.blocks(two) == (5, 0, 0, 0)
        index.sweep(10_000)


def test_sweep_works_in_slices() -> None:
    """Case 31: no slice looks at much more than its budget."""
    index = PrefixIndex()
    slots = [index.open_slot() for _ in range(2)]
    rng = random.Random(3)
    for slot in slots:
        index.store(slot, Tier.GPU, [rng.getrandbits(64) - 2**63 for _ in range(40_000)])
    index.close_slot(slots[0])
    left, passes = index.total_blocks, 0
    while index.sweep(2_000):
        assert left - index.total_blocks < 4_000
        left, passes = index.total_blocks, passes + 1
    assert passes >= 20
    assert index.total_blocks == 40_000


@pytest.mark.parametrize("cap", ["total", "slot"])
def test_caps_refuse_what_goes_beyond(cap: str) -> None:
    """Cases 9, 104."""
    index = PrefixIndex(max_blocks=100) if cap == "total" else PrefixIndex(max_blocks_per_slot=100)
    slot = index.open_slot()
    assert index.store(slot, Tier.GPU, list(range(90))) == 0
    assert index.store(slot, Tier.GPU, list(range(90, 120))) == 10 + 10
    assert index.match(list(range(120))) == {slot: (100,) * 4}
    assert index.store(slot, Tier.GPU, [500]) == 1
    index.remove(slot, Tier.GPU, [3])
    assert index.store(slot, Tier.GPU, [3]) == 0


def test_the_memory_of_empty_tables_is_given_back_in_slices_too() -> None:
    """64 tables of a megabyte freed in one slice were a stall of 6 ms."""
    index = PrefixIndex()
    slot = index.open_slot()
    rng = random.Random(3)
    for _ in range(1000):
        index.store(slot, Tier.GPU, [rng.getrandbits(64) - 2**63 for _ in range(200)])
    index.clear(slot)
    tables = index._tables[Tier.GPU]
    freed: list[int] = []
    more = True
    while more:
        before = sum(shard.__sizeof__() for shard in tables.shards)
        largest = max(shard.__sizeof__() for shard in tables.shards)
        more = index.sweep(100)
        freed.append(before - sum(shard.__sizeof__() for shard in tables.shards))
        assert freed[-1] <= largest, "more than one table in a slice of 100 looks"
    assert sum(freed) > 1_000_000


def test_blocks_waiting_for_the_sweep_do_not_count_against_the_cap() -> None:
    index = PrefixIndex(max_blocks=2000)
    slot = index.open_slot()
    index.store(slot, Tier.GPU, list(range(2000)))
    index.clear(slot)
    assert index.store(slot, Tier.GPU, list(range(5000, 7000))) == 0


def test_closing_slots_and_churn_give_memory_back() -> None:
    """Cases 30, 32: tables are rebuilt when they are mostly holes; a closed slot is unknown."""
    index = PrefixIndex()
    rng = random.Random(5)
    baseline = _resident_mb()
    for _ in range(3):
        slots = [index.open_slot() for _ in range(20)]
        for slot in slots:
            keys = [rng.getrandbits(64) - 2**63 for _ in range(10_000)]
            index.store(slot, Tier.GPU, keys)
            index.remove(slot, Tier.GPU, keys[5_000:])
        for slot in slots:
            index.close_slot(slot)
        while index.sweep(20_000):
            pass
    del keys
    assert index.total_blocks == 0
    assert sum(shard.__sizeof__() for shard in shards_of(index)) < 400_000
    assert _resident_mb() - baseline < 12
    with pytest.raises(KeyError):
        index.store(slots[0], Tier.GPU, [1])


def test_discarded_dicts_are_emptied_by_the_sweep() -> None:
    index = PrefixIndex()
    mapping = dict.fromkeys(range(1000))
    index.discard(mapping)
    assert index.sweep(400)
    assert len(mapping) == 600
    while index.sweep(400):
        pass
    assert not mapping


def _resident_mb() -> float:
    gc.collect()
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("needs /proc")
    return int(statm.read_text().split()[1]) * resource.getpagesize() / 1e6

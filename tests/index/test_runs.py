"""Runs of blocks: random histories of a fleet against a linear walk and a naive model, and what a step may cost."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256

import pytest

from router.contract.events import Tier
from router.index import runs
from router.index.prefix import Depths, PrefixIndex
from router.index.runs import MAX_RUN_BLOCKS, Run, RunTable

CASES = int(os.environ.get("KV_ROUTER_FUZZ_CASES", "400"))
Held = dict[Tier, Counter[int]]


def chain_from(parent: int, tokens: Sequence[int]) -> list[int]:
    """Keys that commit to all before them, as real ones do."""
    keys = []
    for token in tokens:
        parent = int.from_bytes(sha256(b"%d %d" % (parent, token)).digest()[:8], "big", signed=True)
        keys.append(parent)
    return keys


class History:
    """One random fleet: prompts that share prefixes, and slots that store, lose and clear them in every order."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.index = PrefixIndex()
        self.length = rng.choice([3, 12, 40, 200])
        self.prompts = [chain_from(seed, [rng.randrange(2) for _ in range(self.length)])]
        for _ in range(rng.randrange(4)):
            shared = rng.choice(self.prompts)[: rng.randrange(self.length)]
            tail = [rng.randrange(9) for _ in range(rng.randrange(1, self.length))]
            self.prompts.append(shared + chain_from(shared[-1] if shared else seed + 1, tail))
        self.tiers = rng.choice([[Tier.GPU], [Tier.GPU, Tier.GPU, Tier.CPU_PINNED], list(Tier)])
        self.slots: dict[int, Held] = {}
        for _ in range(rng.choice([1, 2, 5, 70])):
            self.open()

    def open(self) -> None:
        self.slots[self.index.open_slot()] = {tier: Counter() for tier in Tier}

    def part(self) -> tuple[list[int], int | None]:
        """Some blocks of a prompt, mostly in order, and what claims to be the block before them."""
        rng, prompt = self.rng, self.rng.choice(self.prompts)
        start = rng.choice([0, 0, rng.randrange(len(prompt))])
        keys = prompt[start : start + rng.choice([1, 4, 16, len(prompt)])]
        parent = prompt[start - 1] if start else None
        kind = rng.random()
        if kind < 0.06:
            rng.shuffle(keys)
        elif kind < 0.12:
            keys = [key for key in keys if rng.random() < 0.7]
        elif kind < 0.18:
            keys = keys + rng.choices(keys, k=2)
        elif kind < 0.24:
            keys = keys + rng.choice(self.prompts)[:3]
        elif kind < 0.3:
            parent = rng.choice(rng.choice(self.prompts))
        return keys, parent

    def store_whole(self, slot: int) -> None:
        """As an engine does it: a prompt from its start, in events of equal size."""
        prompt, size, tier = self.rng.choice(self.prompts), self.rng.choice([1, 2, 16, 64]), self.rng.choice(self.tiers)
        for start in range(0, len(prompt), size):
            keys = [key + 0 for key in prompt[start : start + size]]
            self.index.store(slot, tier, keys, prompt[start - 1] if start else None)
            self.slots[slot][tier].update(keys)

    def evict(self, slot: int) -> None:
        """From the end, a node or a page an event; sometimes not from the end."""
        prompt, tier = self.rng.choice(self.prompts), self.rng.choice(self.tiers)
        keys = prompt[self.rng.randrange(len(prompt)) :][::-1]
        if self.rng.random() < 0.3:
            keys = keys[self.rng.randrange(len(keys)) :]
        size = self.rng.choice([1, 8, len(keys)])
        for start in range(0, len(keys), size):
            self.remove(slot, tier, keys[start : start + size])

    def remove(self, slot: int, tier: Tier | None, keys: Sequence[int]) -> None:
        self.index.remove(slot, tier, keys)
        for one in Tier if tier is None else (tier,):
            counts = self.slots[slot][one]
            for key in keys:
                if counts[key]:
                    counts[key] -= 1

    def step(self) -> None:
        rng = self.rng
        slot = rng.choice(list(self.slots))
        dice = rng.random()
        if dice < 0.35:
            self.store_whole(slot)
        elif dice < 0.6:
            keys, parent = self.part()
            tier = rng.choice(self.tiers)
            assert self.index.store(slot, tier, keys, parent) == 0
            self.slots[slot][tier].update(keys)
        elif dice < 0.75:
            self.evict(slot)
        elif dice < 0.9:
            self.remove(slot, rng.choice([None, *self.tiers]), self.part()[0])
        elif dice < 0.95:
            if rng.random() < 0.5:  # as after more stores than are cleared one by one
                self.index._slots[slot].recent = None
            self.index.clear(slot)
            self.slots[slot] = {tier: Counter() for tier in Tier}
        elif dice < 0.97:
            self.index.close_slot(slot)
            del self.slots[slot]
            self.open()
        else:
            self.index.sweep(rng.choice([1, 20, 1000]))

    def check(self) -> None:
        prompt = self.rng.choice(self.prompts)
        asked = prompt[: self.rng.choice([len(prompt), self.rng.randrange(len(prompt) + 1)])]
        if self.rng.random() < 0.2:
            asked = asked + chain_from(7, [1, 2, 3])
        assert self.index.match(asked) == self.expected(asked) == self.linear(asked)
        for slot, tiers in self.slots.items():
            assert self.index.blocks(slot) == tuple(sum(1 for n in tiers[tier].values() if n) for tier in Tier)

    def expected(self, asked: list[int]) -> dict[int, Depths]:
        found: dict[int, Depths] = {}
        for slot, tiers in self.slots.items():
            depths = []
            for tier in Tier:
                faster = [tiers[t] for t in Tier if t <= tier and tiers[t]]
                depth = 0
                while depth < len(asked) and any(counts[asked[depth]] for counts in faster):
                    depth += 1
                depths.append(depth)
            if depths[3]:
                found[slot] = (depths[0], depths[1], depths[2], depths[3])
        return found

    def linear(self, asked: list[int]) -> dict[int, Depths]:
        """By the index's own tables, block by block."""
        found: dict[int, Depths] = {}
        for slot in self.slots:
            bit = self.index._slots[slot].bit
            depths = []
            for tier in Tier:
                depth = 0
                while depth < len(asked) and any(t.mask(asked[depth]) & bit for t in self.index._tables[: tier + 1]):
                    depth += 1
                depths.append(depth)
            if depths[3]:
                found[slot] = (depths[0], depths[1], depths[2], depths[3])
        return found


def run_history(seed: int) -> None:
    history = History(seed)
    for _ in range(history.rng.choice([4, 12, 30])):
        history.step()
        history.check()


@pytest.mark.parametrize("longest_run", [3, 16, MAX_RUN_BLOCKS])
def test_random_histories_are_looked_up_exactly(longest_run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV_ROUTER_FUZZ_CASES sets how many; 100,000 were run once."""
    monkeypatch.setattr(runs, "MAX_RUN_BLOCKS", longest_run)
    for seed in range(CASES // 3):
        try:
            run_history(seed)
        except AssertionError as error:
            raise AssertionError(f"history {seed} with runs of {longest_run} blocks") from error


CHAIN = chain_from(0, range(64))


def table_of(*parts: tuple[int, Sequence[int]]) -> RunTable:
    table = RunTable(lambda mask: mask)
    for bit, keys in parts:
        table.add(bit, keys)
    return table


def pieces(table: RunTable) -> list[tuple[int, int]]:
    """(holders, blocks) of the runs along CHAIN."""
    found: list[Run] = []
    for key in CHAIN:
        run = table.shards[key >> runs.SHARD_SHIFT].get(key)
        if run is not None and (not found or run is not found[-1]):
            found.append(run)
    return [(run.mask, len(run.keys)) for run in found]


def test_what_several_ranks_store_alike_is_one_run() -> None:
    table = table_of((1, CHAIN), (2, CHAIN), (4, CHAIN))
    assert pieces(table) == [(7, 64)]
    table.discard(2, CHAIN[::-1])
    assert pieces(table) == [(5, 64)]


def test_pages_stored_one_by_one_grow_one_run() -> None:
    """SGLang ≤ 0.5.16. Also when a second rank follows page by page, and when it is evicted page by page."""
    table = table_of()
    for bit in (1, 2):
        for number, key in enumerate(CHAIN):
            assert table.add(bit, [key], CHAIN[number - 1] if number else None) == []
        assert len(pieces(table)) <= 2
    for key in CHAIN[:9:-1]:
        assert table.discard(2, [key]) == 1
    assert pieces(table) == [(3, 10), (1, 53), (1, 1)]


def test_a_hole_cuts_a_run_and_filling_it_restores_the_credit() -> None:
    table = table_of((1, CHAIN), (2, CHAIN))
    assert table.walk(CHAIN, 3) == [(64, 3)]
    assert table.discard(2, [CHAIN[20]]) == 1
    assert table.walk(CHAIN, 3) == [(20, 2), (64, 1)]
    assert table.add(2, [CHAIN[20]], CHAIN[19]) == []
    assert table.walk(CHAIN, 3) == [(64, 3)]


def test_an_event_that_lies_about_its_order_gains_nothing() -> None:
    """Its first and last block are as far apart as in the prompt, what lies between is not the prompt's."""
    liar = [CHAIN[0], *range(8), CHAIN[9]]
    table = table_of((1, liar))
    for _ in range(2):
        assert table.walk(CHAIN[:10], 1) == [(1, 1)]
    table = table_of((1, CHAIN))
    assert table.walk(CHAIN, 1) == [(64, 1)]
    table.add(2, liar)
    assert table.walk(CHAIN, 3) == [(1, 2), (64, 1)]


def test_a_liar_may_lengthen_a_known_run_and_gains_nothing() -> None:
    table = table_of((1, CHAIN[:10]))
    assert table.walk(CHAIN, 1) == [(10, 1)]
    table.add(1, [8], CHAIN[9])
    table.add(1, [CHAIN[11]], 8)
    assert table.walk(CHAIN, 1) == [(10, 1)]


def test_blocks_lost_in_any_order_do_not_make_a_false_chain() -> None:
    table = table_of((1, CHAIN), (2, CHAIN))
    assert table.walk(CHAIN, 3) == [(64, 3)]
    for block in (10, 3, 8):
        table.discard(2, [CHAIN[block]])
    table.discard(1, [CHAIN[9]])
    assert table.walk(CHAIN, 3) == [(3, 2), (9, 1)]


def test_a_prompt_that_leaves_a_run_in_its_middle_goes_on_elsewhere() -> None:
    other = CHAIN[:30] + chain_from(CHAIN[29], [99] * 20)
    table = table_of((1, CHAIN), (2, other))
    for _ in range(2):
        assert table.walk(other, 3) == [(30, 1), (50, 2)]
        assert table.walk(CHAIN, 3) == [(30, 2), (64, 1)]
        assert table.walk(CHAIN[:11], 3) == [(11, 3)]


@pytest.mark.parametrize("order", ["backwards", "shuffled", "every other first"])
def test_blocks_stored_out_of_order_are_put_in_order_by_the_first_lookup(order: str) -> None:
    """A publisher that does this must not make every look-up search its runs block by block (case 104)."""
    keys = {
        "backwards": CHAIN[::-1],
        "shuffled": random.Random(2).sample(CHAIN, 64),
        "every other first": CHAIN[::2] + CHAIN[1::2],
    }[order]
    table = table_of((1, keys))
    assert table.walk(CHAIN, 1) == [(64, 1)]
    assert table.walk(CHAIN, 1) == [(64, 1)]
    assert all(run.is_chain or len(run.keys) == 1 for shard in table.shards for run in shard.values())


def test_a_known_run_is_compared_by_its_last_key_only() -> None:
    """The cost of a look-up is that of its runs, not of its blocks."""

    class Counting(list[int]):
        reads = 0

        def __getitem__(self, where):  # type: ignore[no-untyped-def]
            Counting.reads += 1 if isinstance(where, int) else len(range(*where.indices(len(self))))
            return super().__getitem__(where)

    table = table_of((1, CHAIN))
    asked = Counting(CHAIN)
    assert table.walk(asked, 1) == [(64, 1)]
    assert Counting.reads > 64
    Counting.reads = 0
    assert table.walk(asked, 1) == [(64, 1)]
    assert Counting.reads == 2


def test_long_events_are_stored_in_bounded_runs() -> None:
    keys = chain_from(1, range(3 * MAX_RUN_BLOCKS + 5))
    table = table_of((1, keys))
    assert max(len(run.keys) for run in table._runs) == MAX_RUN_BLOCKS
    assert table.walk(keys, 1) == [(len(keys), 1)]


def test_dead_runs_leave_the_list() -> None:
    table = table_of()
    rng = random.Random(4)
    for n in range(3000):
        keys = [rng.getrandbits(64) - 2**63 for _ in range(8)]
        table.add(1, keys)
        if n % 30:
            table.discard(1, keys)
    assert table.is_worn
    position = 0
    while position >= 0:
        position, _ = table.clean(0, position, 500)
    assert len(table._runs) == 100
    assert table.entries == 800
    assert not table.is_worn

"""From event batches to residency: chains, counts, tiers, namespaces, and what must never be credited."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.hashing import Namespace, pack_ids, prompt_keys
from tests.index.streams import (
    CHAIN,
    CLEARED,
    HASHES,
    PROMPT,
    Worker,
    hashes_of,
    other_hash,
    other_store,
    removed,
    store,
)


def test_many_blocks_chain_within_one_event() -> None:
    """Case 4: the parent belongs to the first hash only; one removal lists blocks of several chains."""
    worker = Worker()
    other = [7, 7, 7, 7]
    worker.feed(
        store(CHAIN[:12], HASHES[:3]), store(CHAIN[12:], HASHES[3:], parent=HASHES[2]), store(other, hashes_of(other))
    )
    assert worker.credit(PROMPT) == 6
    worker.feed(removed([*hashes_of(other), HASHES[5], HASHES[4]]))
    assert worker.credit(PROMPT) == 4
    assert worker.blocks() == 4
    assert worker.counters.orphans == 0


def test_a_clear_takes_effect_at_its_place_in_the_batch() -> None:
    """Case 27: and on its own rank only."""
    worker = Worker(ranks=2)
    worker.feed(store(CHAIN, HASHES), rank=1)
    y = [9] * 4
    worker.feed(store(CHAIN, HASHES), CLEARED, store(y, hashes_of(y)))
    assert (worker.credit(PROMPT), worker.credit([*y, 1]), worker.credit(PROMPT, rank=1)) == (0, 1, 6)


def test_equal_hashes_of_two_namespaces_are_counted() -> None:
    """Case 23: extra_key is not in the default format's hash; stored twice, gone after the second removal."""
    worker = Worker()
    worker.feed(store(CHAIN, HASHES), store(CHAIN, HASHES), removed(HASHES[5:]))
    assert worker.credit(PROMPT) == 6
    worker.feed(removed(HASHES[5:]))
    assert worker.credit(PROMPT) == 5


def test_a_deep_block_of_a_late_joiner_gives_no_credit_until_its_ancestors_are_known() -> None:
    """Case 25: no false match at depth 1, orphans counted."""
    worker = Worker()
    worker.ledgers[0].set_history(complete=False)
    worker.feed(store(CHAIN[4:], HASHES[1:], parent=HASHES[0]))
    assert worker.credit(PROMPT) == worker.credit([*CHAIN[4:], 1]) == 0
    assert worker.counters.orphans == 1
    worker.feed(store(CHAIN[:4], HASHES[:1]))
    assert worker.credit(PROMPT) == 6


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_cycles_and_self_parents_end(engine: str) -> None:
    """Case 29."""
    worker = Worker(engine=engine)
    worker.feed(
        store([1] * 4, [5], parent=5),
        store([1] * 4, [6], parent=7),
        store([2] * 4, [7], parent=6),
        store([1] * 4, [5], parent=7),
    )
    assert worker.credit([1] * 9) == worker.credit([2] * 9) == 0
    worker.feed(removed([5, 6, 7, 5]))
    assert worker.blocks() == 0


def test_tiers_are_apart() -> None:
    """Settled rule 4: a device removal leaves the host copy; absent media mean device and everywhere."""
    worker = Worker()
    worker.feed(
        store(CHAIN, HASHES, medium=None), store(CHAIN[:8], HASHES[:2], medium="CPU_PINNED"), removed(HASHES[1:])
    )
    assert worker.depths(PROMPT) == (1, 2, 2, 2)
    worker.feed(removed(HASHES[1:2], medium=None))
    assert worker.depths(PROMPT) == (1, 1, 1, 1)


def test_an_unknown_medium_is_not_credited_and_its_removal_clears_everywhere() -> None:
    worker = Worker()
    worker.feed(store(CHAIN, HASHES), store(CHAIN, HASHES, medium="TAPE"), store(CHAIN, HASHES, medium="DISK"))
    assert worker.blocks() == 12
    assert worker.counters.unknown_media == 1
    worker.feed(removed(HASHES, medium="TAPE"))
    assert worker.blocks() == 0


def test_a_possibly_missed_removal_degrades_until_the_next_clear() -> None:
    """Case 10."""
    worker = Worker()
    worker.feed(store(CHAIN, HASHES), {"type": "BlockMoved"}, store([1], "bad"))
    assert worker.ledgers[0].degraded
    assert (worker.counters.skipped, worker.counters.doubtful, worker.credit(PROMPT)) == (2, 1, 6)
    worker.feed(CLEARED)
    assert not worker.ledgers[0].degraded


def test_reset_and_close_leave_nothing() -> None:
    """Cases 18, 32."""
    worker = Worker(ranks=2)
    worker.feed(store(CHAIN, HASHES))
    worker.ledgers[0].reset()
    assert worker.blocks() == 0
    worker.feed(store(CHAIN, HASHES))
    worker.ledgers[0].close()
    assert worker.blocks() == 0
    worker.feed(store(CHAIN, HASHES), rank=1)  # the worker goes on without it
    assert worker.credit(PROMPT, rank=1) == 6


def test_vllm_is_keyed_by_our_chain_without_a_finding() -> None:
    worker = Worker(engine="vllm")
    root = other_store(CHAIN)
    worker.feed(root)
    assert (worker.kind, worker.scheme.proven, worker.credit(PROMPT), worker.scheme.findings) == ("xxh3", True, 6, ())
    # Host copies are announced without tokens or parent: the hash alone names them.
    worker.feed(store([], root["block_hashes"][2:], medium="CPU"), removed(root["block_hashes"][2:]))
    assert worker.depths(PROMPT) == (2, 6, 6, 6)
    worker.feed(store([], [123], medium="CPU"), store([9] * 4, [124], medium="CPU"))
    assert worker.credit([9] * 5) == 0  # where that block belongs is not known
    assert (worker.counters.skipped, worker.counters.orphans) == (1, 1)


def test_vllm_namespaces_come_from_extra_keys() -> None:
    """Cases 40–42: salt in the first block's list, adapter's name first, media keys stop the credit."""
    worker = Worker(engine="vllm")
    one, two, three, four, five = ([n] * 8 for n in range(5))
    worker.feed(
        other_store(one, extra_keys=[["salt"], None]),
        other_store(two, lora_name="ad", extra_keys=[["ad"], ["ad"]]),
        other_store(three, lora_name="ad", extra_keys=[["ad", "salt"], ["ad"]]),
        other_store(four, extra_keys=[None, ["image"]]),
        other_store(five, extra_keys=[[["image", 0]], None]),
    )
    names = [Namespace(), Namespace("salt"), Namespace(lora_name="ad"), Namespace("salt", "ad")]
    assert [[worker.credit([*tokens, 1], name) for name in names] for tokens in (one, two, three, four, five)] == [
        [0, 2, 0, 0],
        [0, 0, 2, 0],
        [0, 0, 0, 2],
        [1, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert worker.blocks() == 10
    child = other_store([8] * 4, parent=other_store(four)["block_hashes"][1])
    worker.feed(child)
    assert worker.credit([*four, *[8] * 4, 1]) == 1


def test_an_adapter_without_a_name_is_not_credited() -> None:
    """vLLM 0.11 sends lora_id alone."""
    worker = Worker(engine="vllm")
    worker.feed(other_store(CHAIN, lora_id=3))
    assert (worker.credit(PROMPT), worker.blocks()) == (0, 6)


def test_other_cache_groups_neither_add_nor_take() -> None:
    """vllm#51614: sliding-window groups with hashes of their own width."""
    worker = Worker(engine="vllm")
    event = other_store(CHAIN, group_idx=0, kv_cache_spec_kind="full_attention")
    side = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}
    worker.feed(event | side | {"block_size": 2}, event, event | side, removed(event["block_hashes"], group_idx=1))
    assert (worker.credit(PROMPT), worker.counters.other_groups) == (6, 2)
    worker.feed(removed(event["block_hashes"][5:], group_idx=0))
    assert worker.credit(PROMPT) == 5


def real_tree(rng: random.Random, steps: int) -> tuple[list[dict[str, Any]], dict[tuple[int, ...], int]]:
    """Events of a tree whose blocks are (prefix) tuples of two-token pages: leaf-first eviction, no namespaces."""
    resident: set[tuple[int, ...]] = set()
    events: list[dict[str, Any]] = []
    names: dict[tuple[int, ...], int] = {}
    for _ in range(steps):
        prompt = tuple(rng.choice([1, 2]) for _ in range(rng.randrange(2, 12, 2)))
        for end in range(2, len(prompt) + 1, 2):
            block = prompt[:end]
            names[block] = other_hash(block, None)
            if block not in resident:
                resident.add(block)
                events.append(store(block[-2:], [names[block]], names.get(block[:-2]), width=2))
        leaves = [b for b in sorted(resident) if not any(len(o) > len(b) and o[: len(b)] == b for o in resident)]
        for leaf in rng.sample(leaves, rng.randrange(len(leaves))):
            resident.remove(leaf)
            events.append(removed([names[leaf]], medium=rng.choice([None, "GPU"])))
    return events, {block: names[block] for block in resident}


@given(st.integers(0, 2**32), st.sampled_from(["vllm", "sglang", "unknown"]), st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_any_stream_of_unknown_hashes_gives_the_trees_own_prefixes(seed: int, engine: str, steps: int) -> None:
    rng = random.Random(seed)
    events, resident = real_tree(rng, steps)
    worker = Worker(width=2, engine=engine)
    while events:
        count = rng.randrange(1, 4)
        worker.feed(*events[:count])
        events = events[count:]
    assert worker.blocks() == len(resident)
    assert worker.counters.orphans == 0
    for _ in range(20):
        prompt = tuple(rng.choice([1, 2]) for _ in range(11))
        want = 0
        while prompt[: 2 * want + 2] in resident and want < 5:
            want += 1
        assert worker.credit(prompt) == want


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_fold_is_independent_of_batching(cuts: list[int]) -> None:
    events, _ = real_tree(random.Random(sum(cuts)), 12)
    whole, sliced = Worker(width=2), Worker(width=2)
    whole.feed(*events)
    for cut in cuts:
        sliced.feed(*events[:cut])
        events = events[cut:]
    sliced.feed(*events)
    keys = prompt_keys(whole.scheme.scheme, pack_ids([1, 2, 1, 1, 2, 2])) or []
    assert whole.index.match(keys) == sliced.index.match(keys)
    assert whole.index.blocks(0) == sliced.index.blocks(0)

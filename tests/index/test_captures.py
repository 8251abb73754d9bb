"""Every recorded stream folded through decoder, ledger and index: the credit must be what the real tree still held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from router.contract.events import decode_batch
from router.hashing import Namespace, creditable_blocks, pack_ids, prompt_keys
from router.index.ledger import RankLedger, WorkerScheme
from router.index.prefix import PrefixIndex
from tests.captures import Capture, capture, names


@dataclass
class Rank:
    index: PrefixIndex
    slot: int
    worker: WorkerScheme
    ledger: RankLedger

    def feed(self, payload: bytes) -> None:
        self.ledger.apply(decode_batch(payload))

    def credit(self, tokens: list[int], namespace: Namespace | None = None) -> int:
        """Tokens (pairs, for bigrams) of the prompt this rank is taken to hold, as /route would say."""
        scheme = self.worker.scheme
        keys = prompt_keys(scheme, pack_ids(tokens), namespace or Namespace())
        found = self.index.match(keys or [], creditable_blocks(scheme, len(tokens)))
        return max(found.get(self.slot, (0,))) * scheme.width

    def blocks(self) -> int:
        return sum(self.index.blocks(self.slot))


def rank_of(recorded: Capture) -> Rank:
    engine = "vllm" if "vllm" in recorded.name else "sglang"
    worker = WorkerScheme(recorded.side.get("page_size") or 16, engine, bool(recorded.side.get("is_eagle")))
    index = PrefixIndex()
    slot = index.open_slot()
    return Rank(index, slot, worker, RankLedger(index, slot, worker))


def capped(tokens: list[int], resident: int, rank: Rank) -> int:
    return min(resident, creditable_blocks(rank.worker.scheme, len(tokens)) * rank.worker.scheme.width)


def namespace_of(path: dict[str, Any]) -> Namespace:
    extra = path["extra_key"]
    if extra is not None and len(extra) == 32:  # this extra_key is an adapter's id; its name is in the event
        return Namespace(path["cache_salt"], "my-adapter")
    return Namespace(path["cache_salt"], None, extra)


def undecidable(name: str, path: dict[str, Any]) -> str | None:
    """Why the events cannot tell this path's residency, or None."""
    if "namespaces_default" in name and not (path["extra_key"] is None and path["cache_salt"] == "saltB"):
        return "extra_key is not in the default format's hash: other namespaces hold the same hashes"
    if "namespaces_dynamo" in name and path["extra_key"] is not None:
        return "extra_key is in the dynamo format's hash, by a rule the contract does not give"
    return None


WITH_PATHS = [name for name in names("sgl_") if "paths" in capture(name).side["truth"]]
OLD_SGLANG = names("old_sglang_")
VLLM = [name for name in names() if "vllm" in name]


def test_every_scenario_is_covered() -> None:
    assert len(WITH_PATHS) == 34
    assert sorted(WITH_PATHS + OLD_SGLANG + VLLM) == names()


@pytest.mark.parametrize("name", WITH_PATHS)
def test_credit_equals_the_real_tree(name: str) -> None:
    recorded = capture(name)
    rank = rank_of(recorded)
    for frame in recorded.frames:
        rank.feed(frame.payload)
    wrong = []
    for number, path in enumerate(recorded.side["truth"]["paths"]):
        want = capped(path["tokens"], path["resident_tokens"], rank)
        got = rank.credit(path["tokens"], namespace_of(path))
        if got != want and undecidable(name, path) is None:
            wrong.append((number, want, got))
    assert not wrong, f"(path, want, got): {wrong}"
    assert rank.worker.scheme.kind == "sglang-sha256"
    assert rank.worker.proven
    assert rank.ledger.counters.skipped == rank.ledger.counters.odd_widths == rank.ledger.counters.orphans == 0
    assert not rank.ledger.degraded


def test_paths_that_events_cannot_tell_are_few_and_known() -> None:
    counts = {
        name: sum(undecidable(name, path) is not None for path in capture(name).side["truth"]["paths"])
        for name in WITH_PATHS
    }
    assert {name: n for name, n in counts.items() if n} == {
        "sgl_radix_page16_namespaces_default": 7,
        "sgl_radix_page16_namespaces_dynamo": 5,
        "sgl_unified-rust_page16_namespaces_default": 7,
        "sgl_unified-rust_page16_namespaces_dynamo": 5,
    }


@pytest.mark.parametrize("name", WITH_PATHS)
def test_before_every_step_the_credit_is_what_the_tree_matched_then(name: str) -> None:
    recorded = capture(name)
    rank = rank_of(recorded)
    frames = {frame.seq: frame.payload for frame in recorded.frames}
    wrong = []
    for number, op in enumerate(recorded.side["ops"]):
        truth = op.get("already_cached", op.get("matched"))
        namespaced = op.get("extra") is not None or "namespaces" in name
        if op["op"] in ("insert", "match") and truth is not None and not op.get("deferred") and not namespaced:
            want = capped(op["tokens"], truth, rank)
            got = rank.credit(op["tokens"])
            if got != want:
                wrong.append((number, want, got))
        if "seq" in op:
            rank.feed(frames.pop(op["seq"]))
    assert not wrong, f"(op, want, got): {wrong}"


@pytest.mark.parametrize("name", OLD_SGLANG)
def test_old_releases_end_with_the_right_blocks_and_credit(name: str) -> None:
    """Up to 0.5.3 hashes are those of Python tuples: the rank is keyed by our own chain (design section 4)."""
    recorded = capture(name)
    rank = rank_of(recorded)
    for frame in recorded.frames:
        rank.feed(frame.payload)
    old = "0.4.10" in name or "0.5.3_" in name
    assert rank.worker.scheme.kind == ("xxh3" if old else "sglang-sha256")
    assert [finding.kind for finding in rank.worker.findings] == (["hash"] if old else [])
    assert rank.blocks() == recorded.side["truth"]["resident_unique_blocks"]
    inserts = [op["tokens"] for op in recorded.side["ops"] if op["op"] == "insert"]
    width = rank.worker.scheme.width
    for tokens in inserts:
        shared = 0
        while tokens[shared : shared + 1] == inserts[-1][shared : shared + 1] != []:
            shared += 1
        assert rank.credit(tokens) == capped(tokens, shared // width * width, rank)
    assert rank.ledger.counters.skipped == 0


@pytest.mark.parametrize("name", ["old_sglang_0.4.10_page16", "old_sglang_0.4.10_page1"])
def test_a_constant_root_parent_gives_full_credit_at_every_step(name: str) -> None:
    """SGLang 0.4.10 gives roots the hash of an empty tuple as parent."""
    recorded = capture(name)
    rank = rank_of(recorded)
    first, second = (op["tokens"] for op in recorded.side["ops"][1:3])
    for frame in recorded.frames[:3]:
        rank.feed(frame.payload)
    assert rank.credit([*first, 9]) == len(first)
    assert rank.credit([*second, 9]) == len(second)
    assert rank.ledger.counters.orphans == 0


def test_pages_that_falsely_claim_to_be_roots_earn_nothing() -> None:
    """SGLang 0.5.3 stores the pages after a node split without a parent: no credit at depth 1 for a prompt that begins
    with them, and they are counted."""
    recorded = capture("old_sglang_0.5.3_page16")
    rank = rank_of(recorded)
    tokens = recorded.side["ops"][1]["tokens"]
    for frame in recorded.frames[:3]:
        rank.feed(frame.payload)
    assert rank.credit([*tokens, 9]) == 48  # up to the split
    assert rank.credit([*tokens[48:], 9]) == 0
    assert rank.credit([*range(3000, 3032), 9]) == 0
    assert rank.ledger.counters.orphans == 2
    assert rank.blocks() == 7


CHAINS = {
    "ints": [*range(100, 132), *range(200, 216)],
    "bytes": [*range(300, 332)],
    "lora": [*range(400, 432)],
    "sliding": [*range(500, 516)],
}


@pytest.mark.parametrize("name", VLLM)
def test_vllm_streams_are_decoded_whole_and_credited(name: str) -> None:
    """Ints above 2^63, 32-byte hashes, adapters, other cache groups, a host tier and a clear."""
    recorded = capture(name)
    rank = rank_of(recorded)
    for frame in recorded.frames[:4]:
        rank.feed(frame.payload)
    assert rank.credit([*CHAINS["ints"], 9]) == 48
    assert rank.credit([*CHAINS["bytes"], 9]) == 32
    if name != "old_vllm_0.11.0":  # which names no adapter on the wire
        assert rank.credit([*CHAINS["lora"], 9]) == 0
        assert rank.credit([*CHAINS["lora"], 9], Namespace(lora_name="ad1")) in (16, 32)
    for frame in recorded.frames[4:7]:
        rank.feed(frame.payload)
    # Block 12 went from the device, its host copy stays: the chain holds in the slower tier.
    keys = prompt_keys(rank.worker.scheme, pack_ids(CHAINS["ints"]))
    assert keys is not None
    assert rank.index.match(keys) == {rank.slot: (1, 2, 2, 2)}
    assert rank.credit([*CHAINS["bytes"], 9]) == 16
    rank.feed(recorded.frames[7].payload)
    assert rank.blocks() == 0
    assert all(rank.credit([*tokens, 9]) == 0 for tokens in CHAINS.values())
    assert rank.ledger.counters.skipped == rank.ledger.counters.odd_widths == 0
    assert rank.worker.scheme.kind == "xxh3"

"""The operations of every SGLang 0.5.23 capture, run through the simulated cache: same bytes, same truth."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from router.contract.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch, decode_token_ids
from router.engine.radix import RadixCache
from router.engine.wire import PageHasher, encode_batch
from router.hashing import Namespace, pack_ids, token_count
from tests.captures import Capture, capture, names

LORA_ID = "ab" * 16  # the captures carry the adapter as the extra key SGLang makes of it
LORA_NAME = "my-adapter"

# Batches whose hashes are seeded by a rule nobody published (adapters; anything salted in the dynamo format): our own
# seed stands in, so the bytes differ there and nowhere else. Seqs of the stores and of their removals.
OWN_SEED = {"default": {7}, "dynamo": {2, 3, 4, 5, 6, 7, 8, 10, 11}}


def namespace(salt: str | None, extra: str | None) -> Namespace:
    if extra == LORA_ID:
        return Namespace(cache_salt=salt, lora_name=LORA_NAME)
    return Namespace(cache_salt=salt, extra_key=extra)


def hasher_of(side: dict[str, Any]) -> PageHasher:
    return PageHasher(side["page_size"], bigram=side["is_eagle"], format=side["kv_events_format"])


def replayed(recorded: Capture) -> tuple[list[bytes], RadixCache]:
    """Run `ops` through the cache; one payload for every batch, with the capture's own timestamps."""
    side, hasher, cache = recorded.side, hasher_of(recorded.side), RadixCache(1 << 40)
    width = hasher.scheme.width
    stamps = iter([msgspec.msgpack.decode(frame.payload)[0] for frame in recorded.frames])
    payloads = []
    for op in side["ops"]:
        if op["op"] == "insert":
            where, ids = namespace(op.get("salt"), op.get("extra")), pack_ids(op["tokens"])
            keys = hasher.keys(ids, where)
            assert cache.allocate(len(keys))
            found = cache.insert(where, keys, ids)
            cache.release(found.pages)
            assert found.pages * width == op.get("already_cached", found.pages * width)
        elif op["op"] == "match":
            found = cache.match(Namespace(), hasher.keys(pack_ids(op["tokens"]), Namespace()))
            assert found.pages * width == op["matched"]
        elif op["op"] == "evict":
            evicted = cache.evict(-(-op["asked"] // width)) * width
            assert evicted == op.get("evicted", evicted)
        elif op["op"] == "reset":
            cache.clear()
        else:
            assert op["op"] in ("startup", "drain")
        if not op.get("deferred") and (events := cache.take_events()):
            payloads.append(encode_batch(next(stamps), events, side["dp_rank"], hasher.scheme))
    return payloads, cache


def folded(payloads: list[bytes]) -> Counter[int]:
    """An independent reading of the stream: how often each hash is resident."""
    held: Counter[int] = Counter()
    for payload in payloads:
        for event in decode_batch(payload).events:
            if isinstance(event, BlockStored):
                held.update(event.block_hashes)
                ids, pairs = decode_token_ids(event.token_ids)
                assert token_count(ids) == event.block_size * len(event.block_hashes) * (1 + pairs)
            elif isinstance(event, BlockRemoved):
                held.subtract(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                held.clear()
    assert min(held.values(), default=0) >= 0
    return +held


@pytest.mark.parametrize("name", names("sgl_"))
def test_the_streams_bytes_are_the_captured_ones(name: str) -> None:
    recorded = capture(name)
    payloads, _ = replayed(recorded)
    differing = {
        frame.seq for payload, frame in zip(payloads, recorded.frames, strict=True) if payload != frame.payload
    }
    allowed = OWN_SEED[recorded.side["kv_events_format"]] if "namespaces" in name else set()
    assert differing == allowed


@pytest.mark.parametrize("name", names("sgl_"))
def test_the_tree_ends_as_the_real_one_did(name: str) -> None:
    recorded = capture(name)
    _, cache = replayed(recorded)
    hasher, truth = hasher_of(recorded.side), recorded.side["truth"]
    for path in truth["paths"]:
        where = namespace(path["cache_salt"], path["extra_key"])
        pages = cache.peek(where, hasher.keys(pack_ids(path["tokens"]), where))
        assert pages * hasher.scheme.width == path["resident_tokens"]
    assert cache.tree_pages * hasher.scheme.width == truth["tree_total_units"]


@pytest.mark.parametrize("name", names("sgl_"))
def test_the_stream_folds_to_the_truth(name: str) -> None:
    """In the default format namespaces share hashes (case 40), so a path is resident at least as deep as the truth."""
    recorded = capture(name)
    payloads, _ = replayed(recorded)
    held = folded(payloads)
    hasher = hasher_of(recorded.side)
    for path in recorded.side["truth"]["paths"]:
        keys = hasher.keys(pack_ids(path["tokens"]), namespace(path["cache_salt"], path["extra_key"]))
        depth = next((i for i, key in enumerate(keys) if not held[key]), len(keys))
        shared = recorded.side["name"].endswith("namespaces_default") and path["extra_key"] != LORA_ID
        expected = path["resident_blocks"]
        assert depth >= expected if shared else depth == expected

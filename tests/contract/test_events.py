"""Every wire form, and everything a broken or hostile publisher can send."""

from __future__ import annotations

import resource
import struct
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.contract.events import (
    MAX_FRAME_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Tier,
    WireError,
    decode_batch,
    decode_token_ids,
    tier_of,
    token_units,
)
from router.hashing import pack_ids
from tests.captures import capture, names

STORED = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "token_ids": [5, 6, 7, 8],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
}
REMOVED = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU"}
CLEARED = {"type": "AllBlocksCleared"}


def packed(events: Any, *rest: Any) -> bytes:
    return bytes(msgpack.packb([1.5, events, *rest]))


def stored(event: Any) -> BlockStored:
    batch = decode_batch(packed([event]))
    assert not batch.skipped
    (one,) = batch.events
    assert isinstance(one, BlockStored)
    return one


@pytest.mark.parametrize("name", names())
def test_every_recorded_batch_is_read_whole(name: str) -> None:
    """Against msgpack's own reading, event by event."""
    for frame in capture(name).frames:
        batch = decode_batch(frame.payload)
        plain = msgpack.unpackb(frame.payload, strict_map_key=False)
        assert (batch.ts_s, batch.rank, batch.skipped, batch.doubtful) == (plain[0], plain[2], 0, False)
        tags = [event["type"] if isinstance(event, dict) else event[0] for event in plain[1]]
        assert [type(event).__name__ for event in batch.events] == tags
        for event, raw in zip(batch.events, plain[1], strict=True):
            if isinstance(event, BlockStored):
                tokens = raw["token_ids"] if isinstance(raw, dict) else raw[3]
                flat = [x for t in tokens for x in t] if tokens and isinstance(tokens[0], list) else tokens
                assert decode_token_ids(event.token_ids)[0] == pack_ids(flat)
                assert token_units(event.token_ids) == (len(tokens), flat is not tokens)


def test_maps_and_arrays_in_one_batch_are_told_apart_per_event() -> None:
    """Case 1: map keys in any order, unknown keys ignored."""
    odd_order = dict(reversed(STORED.items())) | {"session_id": "s", "cache_salt": "a", "locality": {"x": [1]}}
    batch = decode_batch(
        packed([["BlockStored", [3], 1, [5, 6], 2, None], odd_order, ["BlockRemoved", [3]], CLEARED], 0)
    )
    first, second, third, fourth = batch.events
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.parent_block_hash, first.medium) == ([3], 1, None)
    assert isinstance(second, BlockStored)
    assert (second.block_hashes, second.cache_salt) == ([1, 2], "a")
    assert isinstance(third, BlockRemoved)
    assert (third.block_hashes, third.medium) == ([3], None)
    assert isinstance(fourth, AllBlocksCleared)
    assert batch.skipped == 0


@pytest.mark.parametrize("rest", [(), (3,), (3, None), (None, "future", [1])])
def test_batches_of_two_elements_and_more(rest: tuple[Any, ...]) -> None:
    """Case 2, and case 12: the rank is only what the batch claims."""
    batch = decode_batch(packed([STORED], *rest))
    assert batch.rank == (rest[0] if rest else None)
    assert len(batch.events) == 1


@pytest.mark.parametrize("length", range(5, 16))
def test_stored_arrays_of_any_length(length: int) -> None:
    """Case 2: SGLang ≤ 0.5.3 sends 6 elements, vLLM 0.20 sends 10."""
    whole = ["BlockStored", [1], None, [5, 6], 2, 4, "CPU", "ad", [["k"]], 1, "full_attention", 128, "l", "o", "s"]
    event = stored(whole[:length])
    assert (event.block_hashes, event.block_size) == ([1], 2)
    assert event.lora_id == (4 if length > 5 else None)
    assert event.medium == ("CPU" if length > 6 else None)
    assert event.lora_name == ("ad" if length > 7 else None)
    assert event.group_idx == (1 if length > 9 else None)
    assert event.kv_cache_spec_kind == ("full_attention" if length > 10 else None)


@pytest.mark.parametrize(
    ("slot", "lora_name", "salt"),
    [({"cache_salt": "tenant-a"}, None, "tenant-a"), ("adapter", "adapter", None), (None, None, None), (7, None, None)],
)
def test_the_eighth_array_slot_may_be_metadata(slot: Any, lora_name: str | None, salt: str | None) -> None:
    """Case 3: never dropped, and the salt is honoured."""
    event = stored(["BlockStored", [1], None, [5, 6], 2, None, "GPU", slot])
    assert (event.lora_name, event.cache_salt) == (lora_name, salt)


def test_optional_fields_of_a_wrong_type_count_as_absent() -> None:
    event = stored(STORED | {"medium": 3, "lora_name": [1], "cache_salt": 5, "group_idx": "x", "lora_id": 1.5})
    assert (event.medium, event.lora_name, event.cache_salt, event.group_idx, event.lora_id) == (None,) * 5


@pytest.mark.parametrize("form", ["map", "array"])
def test_all_spellings_of_a_hash_are_one_key(form: str) -> None:
    """Case 6: signed, unsigned, and a 32-byte digest's first eight bytes, big-endian."""
    key = -3488128144981237669
    digest = struct.pack(">q", key) + bytes(24)
    spellings = [key, key + 2**64, digest]
    event = STORED | {"block_hashes": spellings, "parent_block_hash": digest, "token_ids": [1] * 6}
    if form == "array":
        event = ["BlockStored", spellings, digest, [1] * 6, 2]  # type: ignore[assignment]
    one = stored(event)
    assert one.block_hashes == [key] * 3
    assert one.parent_block_hash == key
    removed = decode_batch(packed([REMOVED | {"block_hashes": spellings}])).events[0]
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [key] * 3


def test_good_events_survive_bad_ones() -> None:
    """Case 10: in order, the rest skipped and counted; an unknown type may have been a removal."""
    batch = decode_batch(packed([STORED, {"type": "BlockMoved"}, STORED | {"block_hashes": None}, REMOVED], 0))
    assert [type(event) for event in batch.events] == [BlockStored, BlockRemoved]
    assert (batch.skipped, batch.doubtful, batch.rank) == (2, True, 0)


@pytest.mark.parametrize(
    ("event", "doubtful"),
    [
        (STORED | {"block_hashes": [1, "x"]}, False),
        (STORED | {"block_hashes": [True]}, False),
        (STORED | {"block_hashes": [b"short"]}, False),
        (STORED | {"block_size": "64"}, False),
        ({k: v for k, v in STORED.items() if k != "block_size"}, False),
        (["BlockStored", [1]], False),
        (REMOVED | {"block_hashes": 7}, True),
        (["BlockRemoved"], True),
        ({"block_hashes": [1]}, True),
        ({"type": 4}, True),
        ({3: 4}, True),
        ([], True),
        ([7, 8], True),
        ("BlockRemoved", True),
        (None, True),
    ],
)
def test_only_a_broken_store_leaves_no_doubt(event: Any, doubtful: bool) -> None:
    batch = decode_batch(packed([CLEARED, event, REMOVED]))
    assert [type(e) for e in batch.events] == [AllBlocksCleared, BlockRemoved]
    assert (batch.skipped, batch.doubtful) == (1, doubtful)


def test_a_clear_with_unknown_extras_is_still_a_clear() -> None:
    batch = decode_batch(packed([["AllBlocksCleared", "GPU", 3], CLEARED | {"medium": "GPU"}]))
    assert [type(event) for event in batch.events] == [AllBlocksCleared] * 2


TIME = b"\xcb" + struct.pack(">d", 1.0)
HOSTILE = {
    "empty": b"",
    "not an array": msgspec.msgpack.encode({"a": 1}),
    "an int": b"\x07",
    "one element": b"\x91" + TIME,
    "events not an array": b"\x92" + TIME + b"\x07",
    "truncated": packed([STORED])[:-3],
    "trailing bytes": packed([STORED]) + b"\x00",
    "endless events": b"\x93" + TIME + b"\xdd\xff\xff\xff\xff",
    "endless outer": b"\xdd\xff\xff\xff\xff",
    "endless hashes": b"\x92" + TIME + b"\x91\x82\xa4type\xabBlockStored\xacblock_hashes\xdd\xff\xff\xff\xff",
    "endless tokens": b"\x92" + TIME + b"\x91\x82\xa4type\xabBlockStored\xa9token_ids\xdd\xff\xff\xff\xff",
    "endless map": b"\x92" + TIME + b"\x91\xdf\xff\xff\xff\xff",
    "deep tokens": b"\x92" + TIME + b"\x91\x82\xa4type\xabBlockStored\xa9token_ids" + b"\x91" * 50_000 + b"\x00",
    "deep batch": b"\x91" * 50_000 + b"\x00",
    "too large": bytes(MAX_FRAME_BYTES + 1),
}


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_message_is_refused_and_costs_no_memory(payload: bytes) -> None:
    """Case 9, case 7 (empty payload)."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WireError):
        decode_batch(payload)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024


def test_too_many_hashes_cost_one_event_only() -> None:
    """Case 9."""
    batch = decode_batch(packed([STORED | {"block_hashes": [1] * 65_537}, REMOVED]))
    assert (len(batch.events), batch.skipped) == (1, 1)


def test_extension_types_are_no_token_ids() -> None:
    event = stored(STORED | {"token_ids": msgpack.ExtType(4, b"xy"), "session_id": msgpack.ExtType(5, b"z")})
    assert token_units(event.token_ids) == (-1, False)
    with pytest.raises(WireError):
        decode_token_ids(event.token_ids)


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.0], ["a"], [[1]], [[1, 2, 3]], [[1, -2]], [1, [2, 3]], 5, None])
def test_token_ids_that_are_none(tokens: Any) -> None:
    with pytest.raises(WireError, match="token_ids"):
        decode_token_ids(msgspec.Raw(msgspec.msgpack.encode(tokens)))


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1, max_size=40))
def test_pairs_are_flattened(pairs: list[tuple[int, int]]) -> None:
    """Case 5: lists or tuples, both are msgpack arrays."""
    raw = msgspec.Raw(msgspec.msgpack.encode(pairs))
    assert decode_token_ids(raw) == (pack_ids([token for pair in pairs for token in pair]), True)
    assert token_units(raw) == (len(pairs), True)


@pytest.mark.parametrize("count", [0, 15, 16, 65_535, 65_536])
def test_tokens_are_counted_from_the_header(count: int) -> None:
    assert token_units(msgspec.Raw(msgspec.msgpack.encode([1] * count))) == (count, False)


def test_media_of_both_engines() -> None:
    assert [tier_of(m) for m in ("GPU", "CPU_PINNED", "DISK", "EXTERNAL")] == list(Tier)
    assert (tier_of("CPU"), tier_of("STORAGE"), tier_of(None)) == (Tier.CPU_PINNED, Tier.DISK, Tier.GPU)
    assert tier_of("TAPE") is None


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_no_bytes_raise_anything_but_wire_errors(junk: bytes) -> None:
    for payload in (junk, b"\x92" + TIME + junk, b"\x93" + TIME + b"\x91" + junk + b"\x00"):
        try:
            batch = decode_batch(payload)
        except WireError:
            continue
        assert isinstance(batch.ts_s, float)


JSONISH = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=40)
    | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.lists(st.fixed_dictionaries({}, optional={k: JSONISH | st.just(v) for k, v in STORED.items()}), max_size=4))
def test_any_mix_of_fields_is_applied_or_counted(events: list[dict[str, Any]]) -> None:
    batch = decode_batch(packed([*events, CLEARED]))
    assert len(batch.events) + batch.skipped == len(events) + 1
    assert isinstance(batch.events[-1], AllBlocksCleared)
    for event in batch.events:
        if isinstance(event, BlockStored):
            assert all(-(2**63) <= key < 2**63 for key in event.block_hashes)


def test_a_large_batch_with_an_unusable_event_is_not_gone_through_singly() -> None:
    """Case 9: that costs 10 ns a byte, and everything else waits; a sound one of that size is read."""
    huge = {**STORED, "block_hashes": [1] * 70_000, "token_ids": [7] * 2_100_000}
    with pytest.raises(WireError, match="too many to go through singly"):
        decode_batch(packed([huge]))
    assert len(decode_batch(packed([{**huge, "block_hashes": [1, 2]}])).events) == 1
    assert decode_batch(packed([{**huge, "token_ids": []}, REMOVED])).skipped == 1

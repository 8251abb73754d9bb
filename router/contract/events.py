"""KV event batches as engines publish them (msgpack) → typed values. Every form of every release, decided per event.

A payload is an array `[ts, [event, …], rank?, …]`. An event is a map keyed by `type` (SGLang ≥ 0.5.20, vLLM ≥ 0.24) or
an array that starts with its type (older). Maps are read by name, arrays by position; shorter, longer and unknown forms
are tolerated (cases 1–6, 10). Token ids stay undecoded (`msgspec.Raw`) until somebody needs them: they are most of the
bytes, and the engine's hashes are enough as long as they can be trusted.

A `Raw` is a view: it keeps the whole payload alive. Whoever stores an event for later stores `raw.copy()`.
"""

from __future__ import annotations

import itertools
import struct
import sys
from array import array
from enum import IntEnum
from math import isfinite
from typing import Annotated, Any

from msgspec import Meta, MsgspecError, Raw, Struct, ValidationError
from msgspec.msgpack import Decoder

from router.hashing import TokenIds, pack_ids

MAX_FRAME_BYTES = 32 * 1024 * 1024
MAX_EVENTS = 65_536  # per batch
MAX_HASHES = 65_536  # per event (case 9)
MAX_TOKENS = 8 * 1024 * 1024  # per event
# Going through a batch event by event costs 10 ns a byte at worst, which everything else waits for.
MAX_SALVAGE_BYTES = 2 * 1024 * 1024
_MAX_FIELDS = 64  # per event; real ones have at most 15

# Everything a decoder can raise on hostile bytes: bad UTF-8 and numbers out of range are ValueErrors.
_BAD_BYTES = (MsgspecError, ValueError, RecursionError, OverflowError, MemoryError)


class WireError(Exception):
    """The whole message is unusable. The text says why; the subscriber counts it and goes on."""


class Tier(IntEnum):
    """Where a block lies, fastest first. The names are what /workers and /route print."""

    GPU = 0
    CPU_PINNED = 1
    DISK = 2
    EXTERNAL = 3


_TIERS: dict[str | None, Tier] = {tier.name: tier for tier in Tier}
_TIERS |= {None: Tier.GPU, "CPU": Tier.CPU_PINNED, "STORAGE": Tier.DISK}


tier_of = _TIERS.get
"""The tier of a `medium` field, vLLM's names included. Absent is GPU, as on a store; None: a name nobody knows."""


_Signed = Annotated[int, Meta(le=2**63 - 1)]
_Hashes = Annotated[list[_Signed], Meta(max_length=MAX_HASHES)]
_WideHashes = Annotated[list[int | bytes], Meta(max_length=MAX_HASHES)]


class BlockStored(Struct, gc=False, tag_field="type", tag="BlockStored"):
    """Blocks of one chain, in order. `parent_block_hash` belongs to the first (None: it starts a prompt); each further
    block's parent is the one before it. Hashes are signed 64-bit. `token_ids` is the msgpack of all blocks' tokens:
    ints, or pairs of ints from EAGLE-family engines; `block_size` counts tokens (or pairs) of one block."""

    block_hashes: _Hashes
    token_ids: Raw
    block_size: int
    parent_block_hash: _Signed | None = None
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


class BlockRemoved(Struct, gc=False, tag_field="type", tag="BlockRemoved"):
    """Blocks, of any chains, that left `medium` (None: every tier)."""

    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Struct, gc=False, tag_field="type", tag="AllBlocksCleared"):
    """The rank holds nothing any more, at this position of the stream."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, gc=False):
    """One decoded message. `rank` is what the batch claims, which is counted but never believed (case 12).
    `skipped` events could not be read; `doubtful`: one of those may have been a removal or a clear (case 10)."""

    ts_s: float
    events: list[Event]
    rank: int | None = None
    skipped: int = 0
    doubtful: bool = False


class _MapBatch(Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[BlockStored | BlockRemoved | AllBlocksCleared], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


class _ArrayStored(Struct, array_like=True, tag_field="type", tag="BlockStored"):
    """Positions as in vLLM 0.11–0.20 and SGLang ≤ 0.5.16, whose arrays are a prefix of vLLM's."""

    block_hashes: _WideHashes
    parent_block_hash: int | bytes | None
    token_ids: Raw
    block_size: int
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _ArrayRemoved(Struct, array_like=True, tag_field="type", tag="BlockRemoved"):
    block_hashes: _WideHashes
    medium: str | None = None
    group_idx: int | None = None


class _ArrayCleared(Struct, array_like=True, tag_field="type", tag="AllBlocksCleared"):
    pass


class _ArrayBatch(Struct, array_like=True):
    ts: float
    events: Annotated[list[_ArrayStored | _ArrayRemoved | _ArrayCleared], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


class _WideStored(Struct, tag_field="type", tag="BlockStored"):
    """The map form with any hash type: vLLM's unsigned ints and 32-byte digests."""

    block_hashes: _WideHashes
    token_ids: Raw
    block_size: int
    parent_block_hash: int | bytes | None = None
    lora_id: int | str | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Raw | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None


class _WideRemoved(Struct, tag_field="type", tag="BlockRemoved"):
    block_hashes: _WideHashes
    medium: str | None = None
    group_idx: int | None = None


class _WideBatch(Struct, array_like=True):
    ts: float
    events: Annotated[list[_WideStored | _WideRemoved | AllBlocksCleared], Meta(max_length=MAX_EVENTS)]
    rank: int | None = None


class _LooseBatch(Struct, array_like=True):
    ts: Raw
    events: Annotated[list[Raw], Meta(max_length=MAX_EVENTS)]
    rank: Raw = Raw(b"\xc0")


_map_batch = Decoder(_MapBatch)
_wide_batch = Decoder(_WideBatch)
_array_batch = Decoder(_ArrayBatch)
_loose_batch = Decoder(_LooseBatch)
_loose_map = Decoder(Annotated[dict[str, Raw], Meta(max_length=_MAX_FIELDS)])
_loose_array = Decoder(Annotated[list[Raw], Meta(min_length=1, max_length=_MAX_FIELDS)])
_wide_hashes = Decoder(_WideHashes)
_hash = Decoder(int | bytes | None)
_str = Decoder(str)
_int = Decoder(int)
_float = Decoder(float)
_int_or_str = Decoder(int | str)
_ids = Decoder(Annotated[list[Annotated[int, Meta(ge=0, le=2**32 - 1)]], Meta(max_length=MAX_TOKENS)])
_array16 = struct.Struct(">BHB")  # the head of an array of up to 65,535 elements, and its first byte
_pairs = Decoder(Annotated[list[tuple[int, int]], Meta(max_length=MAX_TOKENS)])

_ARRAY_FIELDS = {
    "BlockStored": _ArrayStored.__struct_fields__,
    "BlockRemoved": _ArrayRemoved.__struct_fields__,
    "AllBlocksCleared": (),
}


def decode_batch(payload: bytes | memoryview) -> EventBatch:
    """Decode one message of the event stream. An event that cannot be read is skipped and counted, the others stand.

    Raises WireError when the message as a whole is no batch: too large, truncated, nested too deep, not an array.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise WireError(f"event message of {len(payload)} bytes; at most {MAX_FRAME_BYTES} are read")
    try:
        # Most begin with a map; the whole question is put only where this byte leaves it open.
        if (len(payload) > 11 and payload[11] & 0xF0 == 0x80) or not _first_event_is_array(payload):
            maps = _map_batch.decode(payload)
            return EventBatch(maps.ts if isfinite(maps.ts) else 0.0, maps.events, maps.rank)
    except ValidationError:
        pass  # other hash types, or not all events of one form
    except _BAD_BYTES as error:
        raise WireError(f"event message is not readable msgpack: {error}") from None
    try:
        return _decode_other(payload)
    except _BAD_BYTES as error:
        raise WireError(f"event message is not an event batch: {error}") from None


def _decode_other(payload: bytes | memoryview) -> EventBatch:
    """All arrays, or maps with any hash type; failing that, each event on its own."""
    decoder: Decoder[_ArrayBatch] | Decoder[_WideBatch]
    decoder = _array_batch if _first_event_is_array(payload) else _wide_batch
    try:
        batch = decoder.decode(payload)
        events = [_canonical(event) for event in batch.events]
    except (ValidationError, ValueError):
        return _decode_mixed(payload)
    return EventBatch(batch.ts if isfinite(batch.ts) else 0.0, events, batch.rank)


def _first_event_is_array(payload: bytes | memoryview) -> bool:
    """A look at the one usual layout: short outer array, float64 time, fewer than 16 events. False decides nothing."""
    return (
        len(payload) > 11
        and payload[1] == 0xCB
        and 0x91 <= payload[10] <= 0x9F
        and (payload[11] & 0xF0 == 0x90 or payload[11] == 0xDC)
    )


def _key(value: int | bytes) -> int:
    """Any spelling of a hash → the signed 64-bit domain. A digest gives its first 8 bytes, as SGLang cuts its own."""
    if isinstance(value, int):
        return value - 2**64 if value > 2**63 - 1 else value
    if len(value) < 8:
        raise ValueError("a block hash of fewer than 8 bytes")
    return int.from_bytes(value[:8], "big", signed=True)


def _canonical(
    event: _ArrayStored | _ArrayRemoved | _ArrayCleared | _WideStored | _WideRemoved | AllBlocksCleared,
) -> Event:
    if isinstance(event, _ArrayStored | _WideStored):
        parent = event.parent_block_hash
        return BlockStored(
            [_key(h) for h in event.block_hashes],
            event.token_ids,
            event.block_size,
            None if parent is None else _key(parent),
            event.lora_id,
            event.medium,
            event.lora_name,
            event.extra_keys,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.cache_salt if isinstance(event, _WideStored) else None,
        )
    if isinstance(event, _ArrayRemoved | _WideRemoved):
        return BlockRemoved([_key(h) for h in event.block_hashes], event.medium, event.group_idx)
    return AllBlocksCleared()


def _decode_mixed(payload: bytes | memoryview) -> EventBatch:
    if len(payload) > MAX_SALVAGE_BYTES:
        raise ValueError(f"one of its events is not usable, and {len(payload)} bytes are too many to go through singly")
    outer = _loose_batch.decode(payload)
    rank = _optional(_int, outer.rank)
    ts: float = _optional(_float, outer.ts) or 0.0
    batch = EventBatch(ts if isfinite(ts) else 0.0, [], rank)
    for raw in outer.events:
        tag = ""
        try:
            tag, fields = _fields(raw)
            batch.events.append(_loose_event(tag, fields))
        except _BAD_BYTES:
            batch.skipped += 1
            # A type this router does not know may well take blocks away; only a store surely does not.
            batch.doubtful = batch.doubtful or tag != "BlockStored"
    return batch


def _fields(raw: Raw) -> tuple[str, dict[str, Raw]]:
    """One event as (type, name → undecoded value), from either form."""
    lead = memoryview(raw)[0]
    if lead & 0xF0 == 0x90 or lead in (0xDC, 0xDD):
        items = _loose_array.decode(raw)
        tag = _str.decode(items[0])
        return tag, dict(zip(_ARRAY_FIELDS.get(tag, ()), items[1:], strict=False))
    fields = _loose_map.decode(raw)
    if "type" not in fields:
        raise ValueError("an event without a type")
    return _str.decode(fields["type"]), fields


def _loose_event(tag: str, fields: dict[str, Raw]) -> Event:
    """Mandatory fields must be right; an optional one of a wrong type counts as absent (cases 2 and 3)."""
    if tag == "AllBlocksCleared":
        return AllBlocksCleared()
    if tag not in _ARRAY_FIELDS:
        raise ValueError(f"unknown event type {tag[:40]!r}")
    hashes = [_key(h) for h in _wide_hashes.decode(fields.get("block_hashes", b""))]
    medium = _optional(_str, fields.get("medium"))
    group = _optional(_int, fields.get("group_idx"))
    if tag == "BlockRemoved":
        return BlockRemoved(hashes, medium, group)
    parent = _hash.decode(fields.get("parent_block_hash", b"\xc0"))
    # An array's lora_name slot holds a map of metadata in some publishers (case 3, sglang#37271).
    metadata = _optional(_loose_map, fields.get("lora_name")) or fields
    return BlockStored(
        hashes,
        fields.get("token_ids", Raw(b"\xc0")),
        _int.decode(fields.get("block_size", b"")),
        None if parent is None else _key(parent),
        _optional(_int_or_str, fields.get("lora_id")),
        medium,
        _optional(_str, metadata.get("lora_name")),
        fields.get("extra_keys"),
        group,
        _optional(_str, fields.get("kv_cache_spec_kind")),
        _optional(_str, metadata.get("cache_salt")),
    )


def _optional(decoder: Decoder[Any], raw: Raw | None) -> Any:
    if raw is None:
        return None
    try:
        return decoder.decode(raw)
    except _BAD_BYTES:
        return None


def token_units(raw: Raw) -> tuple[int, bool]:
    """(entries in `token_ids`, whether they are pairs), from the first bytes alone. (-1, False): not an array."""
    if len(raw) > 3:
        lead, count, first = _array16.unpack_from(raw)
        if lead == 0xDC:
            return count, first & 0xF0 == 0x90 or first == 0xDC or first == 0xDD
    view = memoryview(raw)
    lead = view[0] if len(view) else 0xC0
    if lead == 0xDC and len(view) == 3:
        count, start = (view[1] << 8) | view[2], 3
    elif lead & 0xF0 == 0x90:
        count, start = lead & 0x0F, 1
    elif lead == 0xDD and len(view) >= 5:
        count, start = int.from_bytes(view[1:5], "big"), 5
    else:
        return -1, False
    return count, len(view) > start and (view[start] & 0xF0 == 0x90 or view[start] in (0xDC, 0xDD))


def decode_token_ids(raw: Raw) -> tuple[TokenIds, bool]:
    """A store's token ids, packed, and whether they were pairs; pairs come flattened: t0,t1, t1,t2, … (case 5).

    Raises WireError when they are neither ints in u32 nor pairs of such ints.
    """
    pairs = token_units(raw)[1]
    try:
        if pairs:
            return pack_ids(list(itertools.chain.from_iterable(_pairs.decode(raw)))), True
        ids = array("I", _ids.decode(raw))
    except _BAD_BYTES as error:
        raise WireError(f"token_ids of a stored block: {error}") from None
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes(), False

"""What is read without decoding is what the decoder would have said, or is left to it."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.contract import plain
from router.contract.events import BlockStored, EventBatch, Tier, WireError, decode_batch, decode_token_ids, tier_of
from router.contract.plain import IS_QUICK, MAX_BLOCKS, MAX_FORMS, PlainReader, time_of
from tests.captures import capture, names

WIDTH = 4
HASHES = st.integers(-(2**63), 2**63 - 1)
LARGE = st.integers(2**32, 2**63 - 1)
IDS = st.sampled_from([0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1])
COUNTS = st.sampled_from([4, 5, 15, 16, 17, MAX_BLOCKS])


def message(
    hashes: list[Any],
    parent: Any = None,
    ids: list[Any] | msgspec.Raw | None = None,
    rank: Any = 0,
    ts: float = 1.5,
    **more: Any,
) -> bytes:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}
    event["token_ids"] = [7] * (WIDTH * len(hashes)) if ids is None else ids
    event |= {"block_size": WIDTH, "lora_id": None, "medium": "GPU"} | more
    return msgspec.msgpack.encode([ts, [event], rank])


def reader_of(*payloads: bytes, rank: int = 0) -> PlainReader:
    reader = PlainReader(rank)
    for payload in payloads:
        reader.learn(payload, decode_batch(payload))
    return reader


USUAL = message(list(range(2**40, 2**40 + 16)))


def said(batch: EventBatch) -> tuple[tuple[int, ...], int | None, int]:
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    return tuple(event.block_hashes), event.parent_block_hash, event.block_size


def is_read(reader: PlainReader, payload: bytes, rank: int = 0) -> bool:
    """Whether `payload` goes past the decoder, who then has to say the same of it."""
    found = reader.read(payload)
    if found is None:
        return False
    batch = decode_batch(payload)
    assert found == said(batch)
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    ids, pairs = decode_token_ids(event.token_ids)
    assert (len(ids), pairs) == (4 * event.block_size * len(event.block_hashes), False)
    more = (event.lora_id, event.lora_name, event.extra_keys, event.group_idx, event.kv_cache_spec_kind)
    assert (*more, event.cache_salt, tier_of(event.medium)) == (None,) * 6 + (Tier.GPU,)
    assert (batch.rank in (None, rank), batch.skipped, batch.ts_s) == (True, 0, time_of(payload))
    return True


@given(st.data(), COUNTS, st.none() | LARGE | LARGE.map(lambda n: -n))
@settings(max_examples=200, deadline=None)
def test_hashes_of_any_sign_and_number_are_read_as_the_decoder_reads_them(
    data: st.DataObject, count: int, parent: int | None
) -> None:
    hashes = data.draw(st.lists(LARGE | LARGE.map(lambda n: -n), min_size=count, max_size=count))
    ids = data.draw(st.lists(IDS, min_size=count * WIDTH, max_size=count * WIDTH))
    payload = message(hashes, parent, ids, ts=data.draw(st.floats(0, 2e9)))
    batch = decode_batch(payload)
    assert reader_of(USUAL).read(payload) == said(batch)
    assert time_of(payload) == batch.ts_s


def test_unsigned_hashes_are_the_keys_that_the_decoder_makes_of_them() -> None:
    """vLLM's ints go up to 2**64 - 1."""
    payload = message([2**64 - 1 - n for n in range(16)], 2**63)
    assert reader_of(USUAL).read(payload) == said(decode_batch(payload))


@pytest.mark.parametrize(
    "payload",
    [
        message([1] * 16),  # small ints are packed otherwise
        message(list(range(2**40, 2**40 + 16)), 5),
        message([b"digest of 32 bytes" for _ in range(16)]),
        message([2**40] * (MAX_BLOCKS + 1)),
        message([], ids=[]),
        message([2**40] * 16, ids=[7] * 63),
        message([2**40] * 16, ids=[7] * 65),
        message([2**40] * 16, ids=[(1, 2)] * 64),
        message([2**40] * 16, rank=1),
        message([2**40] * 16, rank=None),
        message([2**40] * 16, medium="CPU_PINNED"),
        message([2**40] * 16, lora_id=3),
        message([2**40] * 16, lora_name="a"),
        message([2**40] * 16, cache_salt="a"),
        message([2**40] * 16, extra_keys=[["a"]] * 16),
        message([2**40] * 16, group_idx=1),
        message([2**40] * 16, kv_cache_spec_kind="sliding_window"),
        msgspec.msgpack.encode([1.5, [], 0]),
        msgspec.msgpack.encode([1, msgspec.msgpack.decode(USUAL)[1], 0]),
        msgspec.msgpack.encode([1.5, msgspec.msgpack.decode(USUAL)[1] * 2, 0]),
        msgspec.msgpack.encode([1.5, msgspec.msgpack.decode(USUAL)[1], 0, 0]),
        msgspec.msgpack.encode([1.5, [{"type": "BlockRemoved", "block_hashes": [2**40], "medium": "GPU"}], 0]),
        USUAL[:-1],
        USUAL + b"\0",
        b"",
    ],
)
def test_any_other_form_is_left_to_the_decoder(payload: bytes) -> None:
    assert reader_of(USUAL).read(payload) is None


def test_a_store_with_more_to_it_is_never_learnt() -> None:
    for more in ({"lora_name": "a"}, {"cache_salt": "s"}, {"group_idx": 0}, {"medium": "DISK"}, {"lora_id": 1}):
        payload = message([2**40] * 16, **more)
        assert reader_of(payload).read(payload) is None
    assert reader_of(message([2**40] * 16, rank=3)).read(message([2**40] * 16, rank=3)) is None
    assert reader_of(message([2**40] * 16, rank=3), rank=3).read(message([2**40] * 16, rank=3)) is not None


def test_a_field_given_twice_is_never_learnt() -> None:
    """The decoder takes the last one."""
    fields = msgspec.msgpack.decode(USUAL)[1][0]
    twice = [*fields.items(), ("block_hashes", [2**50] * 16)]
    packer = msgpack.Packer()
    event = packer.pack_map_header(len(twice)) + b"".join(packer.pack(part) for pair in twice for part in pair)
    payload = USUAL[:11] + event + USUAL[-1:]
    assert said(decode_batch(payload))[0] == (2**50,) * 16
    assert reader_of(payload).read(payload) is None


def test_the_forms_kept_are_few_and_short() -> None:
    reader = reader_of(*(message([2**40] * 16, block_size=4, extra=number) for number in range(5 * MAX_FORMS)))
    assert len(reader._forms) <= MAX_FORMS
    last = message([2**40] * 16, extra=5 * MAX_FORMS - 1)
    assert reader.read(last) == said(decode_batch(last))
    fields = msgspec.msgpack.decode(USUAL)[1][0]
    long = msgspec.msgpack.encode([1.5, [{"type": "BlockStored", "more": 1000 * "x"} | fields], 0])
    assert reader_of(long).read(long) is None


@pytest.mark.parametrize("name", names())
def test_recorded_messages_are_read_as_the_decoder_reads_them(name: str) -> None:
    reader = PlainReader(0)
    for frame in capture(name).frames:
        batch = decode_batch(frame.payload)
        found = reader.read(frame.payload)
        assert found is None or found == said(batch)
        reader.learn(frame.payload, batch)


LEADS = st.sampled_from([0, 0x7F, 0x80, 0x90, 0xA1, 0xC0, *range(0xC4, 0xD9), 0xDC, 0xDD, 0xE0, 0xFF])


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A store with up to three bytes more, less or other than it should have."""
    count = draw(st.integers(1, 4))
    hashes = draw(st.lists(LARGE, min_size=count, max_size=count))
    ids = draw(st.lists(IDS, min_size=count * WIDTH, max_size=count * WIDTH))
    rank = draw(st.sampled_from([0, 0, None, 1]))
    more: dict[str, Any] = draw(st.sampled_from([{}, {}, {"medium": None}, {"extra": [1]}, {"cache_salt": "s"}]))
    payload = bytearray(message(hashes, draw(st.none() | LARGE), array16(ids), rank, **more))
    ids_at, end = payload.index(b"token_ids") + 9, payload.index(b"\xaablock_size")
    for _ in range(draw(st.integers(0, 3))):
        spot = min(draw(st.integers(ids_at, end) | st.integers(0, len(payload) - 1)), len(payload) - 1)
        new = bytes(draw(st.lists(LEADS | st.integers(0, 255), max_size=2)))
        payload[spot : spot + draw(st.integers(0, 2))] = new
    return bytes(payload)


def array16(ids: list[int]) -> msgspec.Raw:
    """As packed from 16 ids on."""
    return msgspec.Raw(b"\xdc" + struct.pack(">H", len(ids)) + b"".join(map(msgspec.msgpack.encode, ids)))


@given(st.lists(damaged(), max_size=6), damaged())
@settings(max_examples=250, deadline=None)
def test_nothing_is_read_that_the_decoder_would_refuse_or_read_otherwise(learnt: list[bytes], payload: bytes) -> None:
    reader = reader_of(USUAL)
    for other in learnt:
        is_read(reader, other)
        try:
            batch = decode_batch(other)
        except WireError:
            continue
        reader.learn(other, batch)
        is_read(reader, other)
    is_read(reader, payload)


@given(st.lists(IDS, min_size=64, max_size=64), st.integers(0, 63), LEADS | st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_ids_of_all_widths_are_counted_and_end_where_the_next_field_begins(
    ids: list[int], number: int, lead: int
) -> None:
    encoded = [msgspec.msgpack.encode(id_) for id_ in ids]
    assert is_read(reader_of(USUAL), message([2**40] * 16, ids=array16(ids)))
    encoded[number] = bytes((lead,)) + encoded[number][1:]
    payload = message([2**40] * 16, ids=msgspec.Raw(b"\xdc\x00\x40" + b"".join(encoded)))
    is_read(reader_of(USUAL), payload)


@pytest.mark.parametrize(
    "ids",
    [
        [(70_000).to_bytes(5)] * 64,  # five fixints each: too many
        [b"\xce\x00\x01\x00\x00"] * 63 + [b"\xce\x00\x01\x00"],  # the last one takes of the next field
        [b"\xce\x00\x01\x00\x00"] * 63 + [b"\x05\x05"],
        [b"\xce\x00\x01\x00\x00"] * 62 + [b"\x05"],
        [b"\xc1"] * 64,  # of no meaning in msgpack
        [b"\xff"] * 64,  # -1
        [b"\xd0\x05"] * 64,
        [b"\xa1a"] * 64,
        [b"\xcf\x00\x00\x00\x00\x00\x00\x00\x05"] * 32 + [b"\x05"] * 32,
        [b"\x05"] * 63 + [b"\xdb\x00\x00\x00\x05aaaaa"],
    ],
)
def test_of_other_ids_the_message_is_left_to_the_decoder(ids: list[bytes]) -> None:
    payload = USUAL[: USUAL.index(b"token_ids") + 9] + b"\xdc\x00\x40" + b"".join(ids)
    assert reader_of(USUAL).read(payload + USUAL[USUAL.index(b"\xaablock_size") :]) is None


def test_only_a_message_of_which_each_byte_is_accounted_for_is_learnt() -> None:
    """What looks like the hashes may lie in a value, and what looks like the time in an array's length."""
    fields = msgspec.msgpack.decode(USUAL)[1][0]
    body = USUAL[USUAL.index(b"\xacblock_hashes") : USUAL.index(b"\xaablock_size")]
    ids = msgspec.Raw(b"\xdc\x00\x40" + bytes(62) + msgspec.msgpack.encode(body) + b"\x05")
    hidden = [{"type": "BlockStored", "token_ids": ids} | fields | {"block_size": WIDTH}]
    long = b"\xdc\xcb\x00" + msgspec.msgpack.encode(1.5)[:7]
    for payload in (msgspec.msgpack.encode([1.5, hidden, 0]), long + USUAL[10:], b"\xdc\x00\x03" + USUAL[1:]):
        reader = reader_of(USUAL)
        try:
            reader.learn(payload, decode_batch(payload))
        except WireError:
            reader.learn(payload, decode_batch(USUAL))
        assert reader.read(payload) is None
        assert len(reader._forms) == 1


def test_it_is_used_where_it_is_compiled() -> None:
    assert IS_QUICK is not str(plain.__file__).endswith(".py")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_plain_store(payload: bytes) -> None:
    assert reader_of(USUAL).read(payload) is None
    with pytest.raises(WireError):
        decode_batch(payload[:5])

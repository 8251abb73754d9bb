"""The form nearly every event message has, read without decoding it: one store, in map form, of blocks on the device.

What such a message says besides its blocks never changes: field names, width, medium, rank. So a message decoded in
full (`learn`) shows how others of its kind begin and end. Where these agree byte for byte, hashes and parent are taken
from between (`read`), and the token ids are gone over one by one: so many as were promised, all of them in u32, and the
last one ends where the known end begins. Anything else is left to `router.contract.events`, which is the judge of both.
What is read here is therefore what the decoder would have said, never what it would have refused.
"""

from __future__ import annotations

from math import isfinite
from struct import Struct
from types import FunctionType
from typing import Final

from router.contract.events import BlockStored, EventBatch, Tier, tier_of

MAX_FORMS: Final = 8
"""A publisher has one or two; with more, the older are forgotten."""
MAX_BLOCKS: Final = 256
_END_BYTES: Final = 160
_HEAD_AT: Final = 10  # behind the outer array's lead and a float64 time
_MAPS: Final = tuple(b"\x91" + bytes((lead,)) for lead in range(0x80, 0x90))  # one event, of fewer than 16 fields
_FLOAT64: Final = 0xCB
_HASHES_FIELD: Final = b"\xa4type\xabBlockStored\xacblock_hashes"
_HASHES_AT: Final = _HEAD_AT + 2 + len(_HASHES_FIELD)
_PARENT_FIELD: Final = b"\xb1parent_block_hash"
_TOKENS_FIELD: Final = b"\xa9token_ids\xdc"  # with the lead of an array of up to 65,535
_SIZE_FIELD: Final = b"\xaablock_size"
_NO_PARENT: Final = _PARENT_FIELD + b"\xc0" + _TOKENS_FIELD
_FIELDS = (b"type", b"block_hashes", b"parent_block_hash", b"token_ids")
_INT64: Final = b"\xcf\xd3"  # leads of unsigned and signed; read as signed, each is the key that `events` makes of it

_hashes: Final[dict[int, Struct]] = {}  # by their number, made when one first comes
_lead_and_count: Final = Struct(">BH")
_count: Final = Struct(">H")
_hash: Final = Struct(">q")
_time: Final = Struct(">d")

PlainStore = tuple[tuple[int, ...], int | None, int]
"""`block_hashes`, `parent_block_hash`, `block_size` of a BlockStored without adapter, salt, further keys or group."""


class PlainReader:
    """Of the messages of one publisher, which is rank `rank`."""

    __slots__ = ("_forms", "_rank")

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # By the end of the message, from the width on: (its first byte, its bytes from the list of events to the only
        # event's hashes, the width).
        self._forms: dict[bytes, tuple[int, bytes, int]] = {}

    def read(self, payload: bytes) -> PlainStore | None:
        """None: not of a known form, or not sound; the message is to be decoded."""
        end = payload.rfind(_SIZE_FIELD, -_END_BYTES)
        form = self._forms.get(payload[end:])
        if form is None:
            return None
        opening, head, width = form
        at = _HASHES_AT
        if not payload.startswith(head, _HEAD_AT) or payload[0] != opening or payload[1] != _FLOAT64 or at + 3 > end:
            return None
        lead, count = _lead_and_count.unpack_from(payload, at)
        if lead == 0xDC:
            at += 3
        elif lead & 0xF0 == 0x90:
            count = lead & 0x0F
            at += 1
        else:
            return None
        stop = at + 9 * count
        if count > MAX_BLOCKS or not count or stop >= end or payload[at:stop:9].strip(_INT64):
            return None
        parent: int | None = None
        if payload.startswith(_NO_PARENT, stop):
            tokens_at = stop + len(_NO_PARENT)
        else:
            parent_at = stop + len(_PARENT_FIELD)
            tokens_at = parent_at + 9 + len(_TOKENS_FIELD)
            if payload[stop:parent_at] != _PARENT_FIELD or payload[parent_at] not in _INT64:
                return None
            if not payload.startswith(_TOKENS_FIELD, parent_at + 9):
                return None
            (parent,) = _hash.unpack_from(payload, parent_at + 1)
        (units,) = _count.unpack_from(payload, tokens_at)
        if units != width * count or not _are_ids(payload, tokens_at + 2, end, units):
            return None
        hashes = _hashes.get(count)
        if hashes is None:
            hashes = _hashes[count] = Struct(">" + count * "xq")
        return hashes.unpack_from(payload, at), parent, width

    def learn(self, payload: bytes, batch: EventBatch) -> None:
        """`batch` is what `payload` was decoded to."""
        event = batch.events[0] if len(batch.events) == 1 else None
        if not isinstance(event, BlockStored) or not _is_plain(event) or batch.rank not in (None, self._rank):
            return
        end = payload.rfind(_SIZE_FIELD, -_END_BYTES)
        head = payload[_HEAD_AT:_HASHES_AT]
        # Each byte up to the hashes is accounted for, so that they are where the decoder finds them, and no field read
        # here comes again behind the ids, where the decoder would take that one.
        if (
            end < 0
            or not 0x92 <= payload[0] <= 0x9F
            or not (head.startswith(_MAPS) and head.endswith(_HASHES_FIELD))
            or any(field in payload[end:] for field in _FIELDS)
        ):
            return
        if len(self._forms) >= MAX_FORMS:
            self._forms.clear()
        self._forms[payload[end:]] = (payload[0], head, event.block_size)
        if self.read(payload) != (tuple(event.block_hashes), event.parent_block_hash, event.block_size):
            del self._forms[payload[end:]]


def time_of(payload: bytes) -> float:
    """A plain message's time (s); 0 where it is no number."""
    (ts_s,) = _time.unpack_from(payload, 2)
    return float(ts_s) if isfinite(ts_s) else 0.0


def _are_ids(payload: bytes, at: int, end: int, count: int) -> bool:
    """Whether from `at` to `end` lie `count` ints of u32, and nothing else. By far most of the work, where it is not
    compiled: see IS_QUICK."""
    while count and at < end:
        lead = payload[at]
        if lead < 0x80:
            at += 1
        elif lead == 0xCD:
            at += 3
        elif lead == 0xCE:
            at += 5
        elif lead == 0xCC:
            at += 2
        else:
            return False
        count -= 1
    return at == end and not count


IS_QUICK: Final = not isinstance(_are_ids, FunctionType)
"""Whether this is compiled. Interpreted, it takes several times as long as the decoder, and is not to be used."""


def _is_plain(event: BlockStored) -> bool:
    if event.lora_id is not None or event.lora_name is not None or event.cache_salt is not None:
        return False
    if event.extra_keys is not None or event.group_idx is not None or event.kv_cache_spec_kind is not None:
        return False
    return tier_of(event.medium) is Tier.GPU

"""What siblings say to each other, as bytes: one msgpack array, authenticated by a keyed MAC. Pure.

A ZMQ message is [topic, MAC, body]; the MAC is BLAKE2b of topic and body, keyed by `siblings.key`. A frame replaces
what its sender said before about the ranks it names; a `whole` one, sent twice a second, about all ranks, so that a
lost frame heals. What was just placed comes with it, once. Nothing is believed that is not newer than what was heard of
the same sender, or that is older than `MAX_AGE_S`: a recorded frame is worth nothing.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from router.index.snapshot import Facts

LOAD_TOPIC = b"kv-router load 1"
REPLY_TOPIC = b"kv-router reply 1"
"""They end with the version of this page's shapes: routers of different versions do not hear each other. What is added
at the end of a shape, with a default, is no new version: older routers read over it. Replies have a topic of their own,
which is subscribed to only while one is waited for: they are large."""
MAC_BYTES = 16
SENDER_BYTES = 16
MAX_BODY_BYTES = 4 << 20
MAX_ENTRIES = 32_768
MAX_PLACED = 2048
MAX_PLACED_KEYS = 512
"""Of one placement; blocks behind them are not told."""
MAX_AGE_S = 30.0
"""Also how far clocks of two machines may differ."""
MAX_SENDERS = 256
"""Remembered, the silent ones included until their frames are too old anyway."""

Id = Annotated[bytes, Meta(min_length=SENDER_BYTES, max_length=SENDER_BYTES)]
Count = Annotated[int, Meta(ge=0, le=1 << 53)]


class Entry(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One rank's load as its sender has it (router.policy.load.Outstanding). `wait_ms`: of the oldest request without a
    first byte; 0 when there is none."""

    worker: Annotated[str, Meta(max_length=512)]
    rank: Annotated[int, Meta(ge=0, le=65_535)]
    requests: Count
    tokens: Count
    queued_uncached_tokens: Count
    decoding: Count
    wait_ms: Annotated[int, Meta(ge=0, le=1 << 40)]
    placed_uncached_tokens: Count


class Placed(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A prompt that was just placed: the first of its blocks that the rank was not known to hold, as keys of 8 bytes
    (router.siblings.placements.packed). `kind`, `width`, `bigram`: a router.hashing.Scheme, maybe one unknown here."""

    worker: Annotated[str, Meta(max_length=512)]
    rank: Annotated[int, Meta(ge=0, le=65_535)]
    kind: Annotated[str, Meta(max_length=64)]
    width: Count
    bigram: bool
    keys: Annotated[bytes, Meta(max_length=8 * MAX_PLACED_KEYS)]


class Frame(msgspec.Struct, array_like=True, frozen=True, tag="load"):
    """`sender`: random, new with every start of a process. `sent_s`: Unix time. `placed`: since the frame before."""

    sender: Id
    seq: Count
    sent_s: float
    whole: bool
    entries: Annotated[list[Entry], Meta(max_length=MAX_ENTRIES)]
    placed: Annotated[list[Placed], Meta(max_length=MAX_PLACED)] = []


class Ask(msgspec.Struct, array_like=True, frozen=True, tag="ask"):
    """Who knows exactly what this rank holds, having applied batch `after_seq`? Answered by Offer."""

    sender: Id
    seq: Count
    sent_s: float
    ask: Id
    worker: Annotated[str, Meta(max_length=512)]
    rank: Annotated[int, Meta(ge=0, le=65_535)]
    after_seq: Count


class Take(msgspec.Struct, array_like=True, frozen=True, tag="take"):
    """Piece `number` of what `donor` offered, please. Answered by Told or No."""

    sender: Id
    seq: Count
    sent_s: float
    ask: Id
    donor: Id
    number: Count


class Offer(msgspec.Struct, array_like=True, frozen=True, tag="offer"):
    sender: Id
    seq: Count
    sent_s: float
    ask: Id


class Told(msgspec.Struct, array_like=True, frozen=True, tag="told"):
    """Piece `number` of `of`: piece 0 is a Heading, the others router.index.snapshot.Piece."""

    sender: Id
    seq: Count
    sent_s: float
    ask: Id
    number: Count
    of: Count
    data: bytes


class No(msgspec.Struct, array_like=True, frozen=True, tag="no"):
    sender: Id
    seq: Count
    sent_s: float
    ask: Id
    why: Annotated[str, Meta(max_length=200)]


class Heading(msgspec.Struct, array_like=True, frozen=True):
    """The state is that after batch `seq`, whose bytes have this `digest`: it shows that both hear the same publisher
    process."""

    seq: Count
    digest: bytes
    facts: Facts


Message = Frame | Ask | Take
Reply = Offer | Told | No


class FrameRefused(Exception):
    """Its text is a metric label: mac, malformed, old, clock, senders."""


_encode = msgspec.msgpack.Encoder().encode
_decode_message = msgspec.msgpack.Decoder(Message).decode
_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def mac_key(secret: str) -> bytes:
    """A key of BLAKE2b's length from a secret of any length."""
    return blake2b(secret.encode(), digest_size=32, person=b"kv-router").digest()


def mac_of(key: bytes, topic: bytes, body: bytes) -> bytes:
    return blake2b(len(topic).to_bytes(2, "big") + topic + body, digest_size=MAC_BYTES, key=key).digest()


def seal(key: bytes, message: Message | Reply) -> list[bytes]:
    """The frames of the ZMQ message."""
    topic = LOAD_TOPIC if isinstance(message, Message) else REPLY_TOPIC
    body = _encode(message)
    return [topic, mac_of(key, topic, body), body]


def opened(key: bytes, mac: bytes, body: bytes) -> Message:
    """A message under LOAD_TOPIC. Raises FrameRefused: mac or malformed."""
    _check(key, LOAD_TOPIC, mac, body)
    try:
        return _decode_message(body)
    except (msgspec.MsgspecError, RecursionError):
        raise FrameRefused("malformed") from None


def opened_reply(key: bytes, mac: bytes, body: bytes) -> Reply:
    """A message under REPLY_TOPIC. Raises FrameRefused: mac or malformed."""
    _check(key, REPLY_TOPIC, mac, body)
    try:
        return _decode_reply(body)
    except (msgspec.MsgspecError, RecursionError):
        raise FrameRefused("malformed") from None


def _check(key: bytes, topic: bytes, mac: bytes, body: bytes) -> None:
    if len(body) > MAX_BODY_BYTES or not hmac.compare_digest(mac, mac_of(key, topic, body)):
        raise FrameRefused("mac")


class Senders:
    """Whether a frame is news. Bounded; `now_s` is Unix time."""

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def check(self, frame: Message | Reply, now_s: float) -> None:
        """Raises FrameRefused: clock (too old, or from the future), old (a newer one was heard), senders (too many)."""
        if not abs(now_s - frame.sent_s) <= MAX_AGE_S:
            raise FrameRefused("clock")
        last = self._last.get(frame.sender)
        if last is None:
            self._forget_silent(now_s)
            if len(self._last) >= MAX_SENDERS:
                raise FrameRefused("senders")
        elif frame.seq <= last[0]:
            raise FrameRefused("old")
        self._last[frame.sender] = frame.seq, now_s
        self._last.move_to_end(frame.sender)

    def _forget_silent(self, now_s: float) -> None:
        """Of whom every recorded frame is too old by now."""
        while self._last:
            sender, (_, heard_s) = next(iter(self._last.items()))
            if now_s - heard_s <= 2 * MAX_AGE_S:
                return
            del self._last[sender]

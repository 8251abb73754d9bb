"""The subscriber's side of ZMTP, byte by byte; against libzmq itself in test_subscriber.py."""

from __future__ import annotations

import itertools
import struct
import tracemalloc
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.stream.zmtp import (
    MAX_COMMAND_BYTES,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    TAKEN_BYTES,
    Message,
    SubscriberWire,
    ZmtpError,
    frame,
)

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def ready(socket_type: bytes = b"PUB", name: bytes = b"Socket-Type") -> bytes:
    body = b"\x05READY" + bytes((len(name),)) + name + struct.pack(">I", len(socket_type)) + socket_type
    return frame(body, command=True)


def established(topic: bytes = b"kv") -> SubscriberWire:
    wire = SubscriberWire(topic)
    wire.received(GREETING + ready())
    wire.agree()
    wire.outgoing.clear()
    assert wire.established
    return wire


def on_the_wire(frames: Sequence[bytes]) -> bytes:
    return b"".join(frame(body, more=number < len(frames) - 1) for number, body in enumerate(frames))


def meant(frames: Sequence[bytes], topic: bytes) -> Message:
    if len(frames) != 3:
        return "frames"
    return (frames[1], frames[2]) if frames[0] == topic else "topic"


def read(wire: SubscriberWire, data: bytes, cuts: Iterable[int]) -> list[Message]:
    found: list[Message] = []
    edges = [0, *sorted(cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        if start == stop:
            continue
        wire.received(data[start:stop])
        while messages := wire.take(3):
            found += messages
    return found


BODIES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"", b"kv", b"kv2", bytes(8), bytes(255), bytes(256), bytes(3000), b"\x01\x02kv\x01\x08"]),
)
MESSAGES = st.lists(
    st.one_of(
        st.lists(BODIES, min_size=1, max_size=6),
        st.tuples(st.just(b"kv"), st.binary(min_size=8, max_size=8), BODIES).map(list),
    ),
    max_size=8,
)


@given(MESSAGES, st.lists(st.integers(0, 4000), max_size=12), st.sampled_from([b"", b"kv", b"k" * 300]))
@example([[b"kv", b"12345678", bytes(300)], [b"kv", b"12345679", b"short"]], [10, 11, 12, 13, 20], b"kv")
def test_messages_come_out_as_they_went_in_however_the_bytes_are_cut(
    messages: list[list[bytes]], cuts: list[int], topic: bytes
) -> None:
    data = b"".join(map(on_the_wire, messages))
    wire = established(topic)
    assert read(wire, data, (min(cut, len(data)) for cut in cuts)) == [meant(frames, topic) for frames in messages]
    assert not wire.outgoing


@given(st.lists(st.integers(0, 110), max_size=10))
def test_the_handshake_may_come_in_any_pieces(cuts: list[int]) -> None:
    data = GREETING + ready(b"XPUB", b"socket-TYPE")
    wire = SubscriberWire(b"kv")
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in itertools.pairwise(edges):
        assert wire.established == (start == len(data))
        wire.received(data[start:stop])
        wire.agree()
    assert wire.established
    greeting, rest = bytes(wire.outgoing[:64]), bytes(wire.outgoing[64:])
    assert greeting == GREETING.replace(b"\x03\x01", b"\x03\x00")
    assert rest == ready(b"SUB") + frame(b"\x01kv")


def test_messages_right_behind_the_handshake_are_not_lost() -> None:
    wire = SubscriberWire(b"kv")
    wire.received(GREETING + ready() + on_the_wire([b"kv", bytes(8), b"x"]))
    wire.agree()
    assert wire.take(9) == [(bytes(8), b"x")]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak ZMTP"),
        (b"\xff" + bytes(8) + b"\x01", "does not speak ZMTP"),
        (GREETING[:10] + b"\x01", "older than 3.0"),
        (GREETING.replace(b"NULL", b"CURV"), "authentication"),
        (GREETING + ready(b"REP"), "no ZMQ socket of the right kind"),
        (GREETING + frame(b"\x05READY", command=True), "no ZMQ socket of the right kind"),
        (GREETING + frame(b"\x05READY\x0bSocket", command=True), "does not speak ZMTP"),
        (GREETING + frame(b"\x05READY\x01a\xff\xff\xff\xff", command=True), "does not speak ZMTP"),
        (GREETING + frame(b"\x05ERROR\x07go away", command=True), "go away"),
        (GREETING + frame(b"kv"), "does not speak ZMTP"),
        (GREETING + b"\x80\x00", "does not speak ZMTP"),
    ],
)
def test_what_is_no_publisher_is_named(data: bytes, why: str) -> None:
    """Case 17."""
    wire = SubscriberWire(b"kv")
    wire.received(data)
    with pytest.raises(ZmtpError, match=why):
        wire.agree()


@pytest.mark.parametrize(
    "head",
    [
        b"\x02" + struct.pack(">Q", MAX_FRAME_BYTES + 1),
        b"\x02" + struct.pack(">Q", 2**64 - 1),
        on_the_wire([b"kv", bytes(8), b""])[:-2] + b"\x02" + struct.pack(">Q", MAX_FRAME_BYTES + 1),
        b"\x06" + struct.pack(">Q", MAX_COMMAND_BYTES + 1),
    ],
)
def test_a_frame_beyond_the_limit_is_refused_by_its_head(head: bytes) -> None:
    """Case 9."""
    wire = established()
    wire.received(head)
    with pytest.raises(ZmtpError, match="at most"):
        wire.take(9)


def test_large_messages_are_not_taken_many_at_once() -> None:
    """Case 31: nobody looks at the clock between those taken together."""
    wire = established()
    large = on_the_wire([b"kv", bytes(8), bytes(TAKEN_BYTES // 2)])
    wire.received(6 * large)
    assert [len(wire.take(16)) for _ in range(4)] == [2, 2, 2, 0]
    wire.received(
        on_the_wire([b"kv", bytes(8), bytes(9 * TAKEN_BYTES)]) + 20 * on_the_wire([b"kv", bytes(8), bytes(9)])
    )
    assert [len(wire.take(16)) for _ in range(4)] == [1, 16, 4, 0]


@pytest.mark.parametrize("flags", [5, 7, 8, 0x80])
def test_flags_nobody_defined_end_the_connection(flags: int) -> None:
    wire = established()
    wire.received(bytes((flags, 0)))
    with pytest.raises(ZmtpError):
        wire.take(9)


@pytest.mark.parametrize("piece", [frame(b"", more=True), frame(b"\x04PING\x00\x00", command=True)])
def test_frames_without_end_that_make_no_message_end_the_connection(piece: bytes) -> None:
    """Case 31: 64 KiB of them would take 20 ms."""
    wire = established()
    wire.received(piece * MAX_FRAMES)
    assert wire.take(9) == []
    wire.received(piece * (MAX_FRAMES + 1))
    with pytest.raises(ZmtpError, match="make no message"):
        wire.take(9)


def test_a_heartbeat_is_answered_with_its_context_even_inside_a_message() -> None:
    wire = established()
    ping = frame(b"\x04PING\x00\x64context", command=True)
    wire.received(frame(b"kv", more=True) + ping + frame(bytes(8), more=True) + frame(b"x"))
    assert wire.take(9) == [(bytes(8), b"x")]
    assert wire.outgoing == frame(b"\x04PONGcontext", command=True)


def test_commands_of_later_versions_are_ignored() -> None:
    wire = established()
    wire.received(frame(b"\x05HELLO later", command=True) + frame(b"", command=True) + on_the_wire([b"a"]))
    assert (wire.take(9), wire.take(9)) == (["frames"], [])


def test_a_long_frame_in_many_pieces_is_put_together_once() -> None:
    """Joining at every piece would copy a 32 MiB frame 500 times."""
    payload = bytes(range(256)) * 4096
    data = on_the_wire([b"kv", bytes(8), payload])
    wire = established()
    assert read(wire, data, range(100, len(data), 1000)) == [(bytes(8), payload)]


@pytest.mark.parametrize("cut", [2, 3000])
def test_a_long_frame_that_drips_takes_up_little_more_than_itself(cut: int) -> None:
    """A publisher that sends two bytes at a time; each kept as an object of its own would be 20 times as large."""
    payload = bytes(range(256)) * 2048
    data = on_the_wire([b"kv", bytes(8), payload])
    wire = established()
    tracemalloc.start()
    try:
        for start in range(0, len(data) - cut, cut):
            wire.received(data[start : start + cut])
            assert wire.take(9) == []
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held_bytes < 2 * len(payload)
    wire.received(data[start + cut :])
    assert wire.take(9) == [(bytes(8), payload)]


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5), st.booleans())
def test_arbitrary_bytes_end_in_messages_or_a_protocol_error(data: bytes, cuts: list[int], greeted: bool) -> None:
    try:
        if greeted:
            read(established(), data, (min(cut, len(data)) for cut in cuts))
        else:
            wire = SubscriberWire(b"kv")
            wire.received(data)
            wire.agree()
    except ZmtpError:
        pass

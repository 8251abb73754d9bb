"""What siblings say, as bytes: authenticated, bounded, and worth nothing when recorded and sent again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.siblings.frames import (
    LOAD_TOPIC,
    MAX_AGE_S,
    MAX_PLACED_KEYS,
    MAX_SENDERS,
    Entry,
    Frame,
    FrameRefused,
    Placed,
    Senders,
    mac_key,
    mac_of,
    opened,
    seal,
)

KEY = mac_key("a secret")
NOW_S = 1_800_000_000.0
counts = st.integers(0, 1 << 53)
entries = st.builds(
    Entry, st.text(max_size=40), st.integers(0, 65_535), counts, counts, counts, counts, st.integers(0, 1 << 40), counts
)
placements = st.builds(
    Placed,
    st.text(max_size=40),
    st.integers(0, 65_535),
    st.text(max_size=20),
    counts,
    st.booleans(),
    st.binary(max_size=8 * MAX_PLACED_KEYS),
)
frames = st.builds(
    Frame,
    sender=st.binary(min_size=16, max_size=16),
    seq=counts,
    sent_s=st.floats(0, 4e9),
    whole=st.booleans(),
    entries=st.lists(entries, max_size=5),
    placed=st.lists(placements, max_size=3),
)


def frame(seq: int = 1, sender: bytes = b"s" * 16, sent_s: float = NOW_S) -> Frame:
    return Frame(sender, seq, sent_s, True, [])


def refusal(**arguments: Any) -> str:
    with pytest.raises(FrameRefused) as refused:
        opened(**arguments)
    return str(refused.value)


@given(frames)
def test_what_is_sealed_is_opened_unchanged(one: Frame) -> None:
    topic, mac, body = seal(KEY, one)
    assert topic == LOAD_TOPIC
    assert opened(KEY, mac, body) == one


@given(frames, st.data())
def test_a_changed_byte_anywhere_is_refused(one: Frame, data: st.DataObject) -> None:
    _, mac, body = seal(KEY, one)
    whole = bytearray(mac + body)
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    assert refusal(key=KEY, mac=bytes(whole[:16]), body=bytes(whole[16:])) == "mac"


def test_another_key_is_refused() -> None:
    _, mac, body = seal(mac_key("another secret"), frame())
    assert refusal(key=KEY, mac=mac, body=body) == "mac"


@given(st.binary(max_size=200))
def test_bytes_that_are_no_frame_are_refused_whoever_signed_them(body: bytes) -> None:
    assert refusal(key=KEY, mac=mac_of(KEY, LOAD_TOPIC, body), body=body) == "malformed"


@pytest.mark.parametrize(("place", "value"), [(1, -1), (2, -1), (6, 1 << 50), (0, "u" * 600), (1, 70_000)])
def test_numbers_out_of_bounds_are_refused(place: int, value: object) -> None:
    entry: list[object] = ["http://w", 0, 0, 0, 0, 0, 0, 0]
    entry[place] = value
    body = msgspec.msgpack.encode(["load", b"s" * 16, 1, NOW_S, True, [entry]])
    assert refusal(key=KEY, mac=mac_of(KEY, LOAD_TOPIC, body), body=body) == "malformed"


PLACED: list[object] = ["http://w", 0, "sglang-sha256", 16, False, b"12345678"]


@pytest.mark.parametrize(
    ("place", "value"),
    [(0, "u" * 600), (0, 5), (1, -1), (1, 70_000), (2, "k" * 70), (3, -1), (4, 1), (5, "text"), (5, b"k" * 4104)],
)
def test_placements_out_of_bounds_are_refused(place: int, value: object) -> None:
    one = [*PLACED[:place], value, *PLACED[place + 1 :]]
    body = msgspec.msgpack.encode(["load", b"s" * 16, 1, NOW_S, True, [], [one]])
    assert refusal(key=KEY, mac=mac_of(KEY, LOAD_TOPIC, body), body=body) == "malformed"


@pytest.mark.parametrize("rest", [[], [[]], [[PLACED]], [[[*PLACED, "and more"]]], [[PLACED], "and more"]])
def test_frames_of_before_and_after_this_version_are_read(rest: list[object]) -> None:
    """A router of the version before tells of no placements; one of a later version tells more."""
    body = msgspec.msgpack.encode(["load", b"s" * 16, 1, NOW_S, True, [], *rest])
    one = opened(KEY, mac_of(KEY, LOAD_TOPIC, body), body)
    assert isinstance(one, Frame)
    assert [placed.keys for placed in one.placed] == ([b"12345678"] if rest and rest[0] else [])


def checked(senders: Senders, one: Frame, now_s: float = NOW_S) -> str:
    try:
        senders.check(one, now_s)
    except FrameRefused as refused:
        return str(refused)
    return "news"


def test_a_frame_is_news_once() -> None:
    senders = Senders()
    assert [checked(senders, frame(seq)) for seq in (1, 3, 3, 2, 4)] == ["news", "news", "old", "old", "news"]


def test_a_recorded_frame_is_worth_nothing_even_after_its_sender_was_forgotten() -> None:
    senders = Senders()
    assert checked(senders, frame(5)) == "news"
    later_s = NOW_S + 3 * MAX_AGE_S
    assert checked(senders, frame(1, b"t" * 16, later_s), later_s) == "news"  # the silent one is forgotten now
    assert checked(senders, frame(5), later_s) == "clock"


@pytest.mark.parametrize("sent_s", [NOW_S - MAX_AGE_S - 1, NOW_S + MAX_AGE_S + 1, float("nan"), float("inf")])
def test_a_frame_of_another_time_is_refused(sent_s: float) -> None:
    assert checked(Senders(), frame(sent_s=sent_s)) == "clock"


def test_many_senders_are_refused_until_the_silent_ones_are_forgotten() -> None:
    senders = Senders()
    for number in range(MAX_SENDERS):
        assert checked(senders, frame(1, number.to_bytes(16, "big"))) == "news"
    assert checked(senders, frame(1, b"x" * 16)) == "senders"
    later_s = NOW_S + 2 * MAX_AGE_S + 1
    assert checked(senders, frame(1, b"x" * 16, later_s), later_s) == "news"

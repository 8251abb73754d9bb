"""Writes of one turn of the event loop go out together at its end; nothing is lost, reordered or held for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.proxy.outbox import HOLD_BYTES, HOLD_S, Outbox, Turn


class Loop:
    """The part of an event loop that a Turn uses, by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.ready: list[Callable[[], None]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, work: Callable[[], None]) -> None:
        self.ready.append(work)

    def end_turn(self) -> None:
        ready, self.ready = self.ready, []
        for work in ready:
            work()


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.sends: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closing
        self.sends.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return 0


def made(count: int) -> tuple[Loop, Turn, list[tuple[Outbox, Transport]]]:
    loop: Any = Loop()
    turn = Turn(loop)
    transports = [Transport() for _ in range(count)]
    return loop, turn, [(Outbox(turn, transport), transport) for transport in transports]


def test_what_one_turn_writes_to_a_connection_is_one_send_at_its_end() -> None:
    loop, _, [(first, at_first), (second, at_second)] = made(2)
    first.write(b"a")
    second.write(b"b")
    first.write(b"c")
    assert (at_first.sends, at_second.sends, first.unsent_bytes) == ([], [], 2)
    loop.end_turn()
    assert (at_first.sends, at_second.sends, first.unsent_bytes) == ([b"ac"], [b"b"], 0)
    assert not loop.ready, "an idle loop is left alone"


def test_in_a_long_turn_the_first_write_does_not_wait_for_its_end() -> None:
    loop, _, [(first, at_first), (second, at_second), (third, at_third)] = made(3)
    first.write(b"a")
    loop.now_s = HOLD_S / 2
    second.write(b"b")
    assert not at_first.sends
    loop.now_s = HOLD_S * 1.1
    third.write(b"c")
    assert (at_first.sends, at_second.sends, at_third.sends) == ([b"a"], [b"b"], [b"c"])
    first.write(b"d")
    assert at_first.sends == [b"a"], "a new wait begins"
    loop.end_turn()
    assert at_first.sends == [b"a", b"d"]


def test_before_long_work_all_can_be_sent() -> None:
    loop, turn, [(outbox, transport)] = made(1)
    outbox.write(b"a")
    turn.flush()
    assert transport.sends == [b"a"]
    loop.end_turn()
    assert transport.sends == [b"a"]


def test_a_large_piece_goes_out_at_once_behind_what_waits() -> None:
    loop, _, [(outbox, transport)] = made(1)
    large = bytes(HOLD_BYTES + 1)
    outbox.write(b"a")
    outbox.write(large)
    assert transport.sends == [b"a", large]
    outbox.write(b"b")
    loop.end_turn()
    assert transport.sends == [b"a", large, b"b"]


def test_a_connection_that_closed_meanwhile_costs_the_others_nothing() -> None:
    loop, _, [(gone, at_gone), (other, at_other)] = made(2)
    gone.write(b"a")
    other.write(b"b")
    at_gone.closing = True
    loop.end_turn()
    gone.write(bytes(HOLD_BYTES + 1))
    assert (at_gone.sends, at_other.sends, gone.unsent_bytes) == ([], [b"b"], 0)


STEPS = st.one_of(
    st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 7, HOLD_BYTES - 3, HOLD_BYTES, HOLD_BYTES + 1])),
    st.sampled_from(["end", "flush", "late"]),
)


@given(st.lists(STEPS, max_size=40))
@settings(max_examples=300)
def test_every_connection_is_sent_what_was_written_in_its_order(steps: list[Any]) -> None:
    loop, turn, pairs = made(3)
    written = [b"", b"", b""]
    for number, step in enumerate(steps):
        if step == "end":
            loop.end_turn()
            assert all(b"".join(transport.sends) == data for (_, transport), data in zip(pairs, written, strict=True))
        elif step == "flush":
            turn.flush()
        elif step == "late":
            loop.now_s += HOLD_S
        else:
            which, size = step
            data = bytes([number % 256]) * size
            written[which] += data
            pairs[which][0].write(data)
        assert all(
            outbox.unsent_bytes + sum(map(len, transport.sends)) == len(data)
            for (outbox, transport), data in zip(pairs, written, strict=True)
        )
        assert all(outbox.unsent_bytes <= HOLD_BYTES for outbox, _ in pairs)
    loop.end_turn()
    assert [b"".join(transport.sends) for _, transport in pairs] == written

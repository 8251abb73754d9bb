"""The bootstrap rooms of one simulated prefill engine: where both legs of a request meet, exactly once. No I/O.

A room is opened by the prefill leg and joined by the decode leg, in either order. SGLang 0.5.23 takes the prefill rank
from `disagg_prefill_dp_rank`, else from the room modulo ranks; here a pair that disagrees about it fails with the
reason instead of waiting for its timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Fault = Literal["", "never", "fails"]
"""What goes wrong in a room: nothing, the legs never find each other, or the transfer breaks."""
KEPT = 200_000
"""Rooms remembered as used."""


class RoomRefused(Exception):
    """Nothing can be handed over in this room; the text says why."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What the decode leg says when it joins."""

    ids_checksum: int
    held_tokens: int
    prefill_rank: int | None


@dataclass(frozen=True, slots=True)
class Handed:
    """What it gets: the prompt's KV (modelled), and how much of it the prefill engine had cached."""

    cached_tokens: int


@dataclass(slots=True, eq=False)
class Room:
    number: int
    joined: asyncio.Future[Joined] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    handed: asyncio.Future[Handed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sides: set[str] = field(default_factory=set)

    def fail(self, why: str) -> None:
        for future in (self.joined, self.handed):
            if not future.done():
                future.set_exception(RoomRefused(why))
                future.exception()  # read: perhaps only one side waits


@dataclass(slots=True)
class RoomCounts:
    """`met`: handed over once. `reused`: a leg came to a room that was used before. `failed`: closed with one side."""

    met: int = 0
    failed: int = 0
    reused: int = 0


class Rooms:
    def __init__(self, fault: Callable[[int], Fault] = lambda room: "") -> None:
        self.counts = RoomCounts()
        self.fault = fault
        """Asked when a room is joined; tests replace it."""
        self._open: dict[int, Room] = {}
        self._used: dict[tuple[str, int], None] = {}

    def __len__(self) -> int:
        """Rooms that one side or both are in now."""
        return len(self._open)

    def enter(self, number: int, side: Literal["prefill", "decode"]) -> Room:
        """Raises RoomRefused for a room this side was in before, now or ever."""
        if (side, number) in self._used:
            self.counts.reused += 1
            raise RoomRefused(f"bootstrap room {number} was used before")
        self._used[(side, number)] = None
        if len(self._used) > KEPT:
            del self._used[next(iter(self._used))]
        room = self._open.get(number)
        if room is None:
            room = self._open[number] = Room(number)
        room.sides.add(side)
        return room

    def leave(self, room: Room, side: str, why: str = "the other side left before the transfer") -> None:
        """The other side, if it still waits, is told `why`."""
        if not room.handed.done():
            room.fail(why)
        room.sides.discard(side)
        if not room.sides and self._open.pop(room.number, None) is not None:
            if room.handed.exception() is None:
                self.counts.met += 1
            else:
                self.counts.failed += 1

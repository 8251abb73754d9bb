"""How simulated engines hand a prompt's KV over: a bootstrap port, rooms, a modelled transfer."""

from __future__ import annotations

import asyncio
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from router.engine.body import BadRequest
from router.engine.rooms import Handed, Joined, Room, RoomRefused, Rooms
from router.hashing import TokenIds

MAX_LINE_BYTES = 4096
NO_ROOM = (
    "Invalid request: Disaggregated request received without bootstrap room id. Do not send requests directly to "
    "prefill or decode instances; send to the router instead."
)


class HandoverFailed(Exception):
    """The other side, or the way between, failed: answered 500, as SGLang does."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where one sequence is handed over, as its body says."""

    host: str
    port: int
    room: int
    prefill_rank: int | None


def read_meetings(body: dict[str, Any], count: int) -> list[Meeting]:
    """One a sequence, read as SGLang 0.5.23 does: lists by position, a single room counted up. Raises BadRequest."""
    rooms, hosts, ports = (body.get(f"bootstrap_{name}") for name in ("room", "host", "port"))
    if rooms is None:
        raise BadRequest(NO_ROOM)
    if type(rooms) is int:
        rooms = [rooms + i for i in range(count)]
    hosts = hosts if isinstance(hosts, list) else [hosts] * count
    ports = ports if isinstance(ports, list) else [ports] * count
    rank = body.get("disagg_prefill_dp_rank")
    if not (isinstance(rooms, list) and len(rooms) == len(hosts) == len(ports) == count):
        raise BadRequest(f"bootstrap fields must be single values or lists of {count}")
    for host, port, room in zip(hosts, ports, rooms, strict=True):
        # Kept in an int64 tensor where 0 means none.
        if not (type(room) is int and 0 < room < 2**63 and isinstance(host, str) and type(port) is int):
            raise BadRequest(f"not a place to meet: {host!r} {port!r} {room!r}")
    if rank is not None and type(rank) is not int:
        raise BadRequest("disagg_prefill_dp_rank must be an integer")
    return [Meeting(host, port, room, rank) for host, port, room in zip(hosts, ports, rooms, strict=True)]


class BootstrapServer:
    """The prefill side: listens for decode engines, and keeps the rooms."""

    def __init__(
        self, rooms: Rooms, *, ranks: int, transfer_tokens_per_s: float, timeout_s: float, time_scale: float
    ) -> None:
        self.rooms = rooms
        self.port = 0
        self._ranks = ranks
        self._speed = transfer_tokens_per_s / time_scale
        self._timeout_s = timeout_s
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_LINE_BYTES)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._serving):
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    def open(self, meeting: Meeting, rank: int) -> Room:
        """The prefill leg is here. Raises BadRequest for a room used before, HandoverFailed where the decode leg would
        look for another rank (SGLang's "follow_bootstrap_room conflict")."""
        implied = meeting.room % self._ranks
        if meeting.prefill_rank is None and rank != implied:
            raise HandoverFailed(
                f"follow_bootstrap_room conflict: dispatched to dp_rank {rank} but bootstrap_room {meeting.room} "
                f"implies dp_rank {implied}"
            )
        try:
            return self.rooms.enter(meeting.room, "prefill")
        except RoomRefused as error:
            raise BadRequest(str(error)) from None

    async def joined(self, room: Room, ids: TokenIds, rank: int) -> Joined:
        """Waits for the decode leg. Raises HandoverFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await asyncio.shield(room.joined)
        except TimeoutError:
            raise HandoverFailed(f"room {room.number}: no decode engine came within {self._timeout_s:g} s") from None
        except RoomRefused as error:
            raise HandoverFailed(str(error)) from None
        believed = found.prefill_rank if found.prefill_rank is not None else room.number % self._ranks
        if believed != rank or found.ids_checksum != zlib.crc32(ids):
            why = f"rank {believed} was expected, rank {rank} has it" if believed != rank else "the prompts differ"
            room.fail(why)
            raise HandoverFailed(f"room {room.number}: {why}")
        return found

    async def deliver(self, room: Room, joined: Joined, tokens: int, cached_tokens: int) -> None:
        """Moves what the decode engine does not hold. Raises HandoverFailed."""
        moving = asyncio.ensure_future(asyncio.sleep(max(0, tokens - joined.held_tokens) / self._speed))
        await asyncio.wait((moving, room.handed), return_when=asyncio.FIRST_COMPLETED)
        moving.cancel()
        if self.rooms.fault(room.number) == "fails":
            room.fail("the transfer failed")
        if room.handed.done():
            raise HandoverFailed(f"room {room.number}: {room.handed.exception()}")
        room.handed.set_result(Handed(cached_tokens))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._join(reader, writer)
        except (ConnectionError, ValueError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the decode engine left, or a port probe looked in
        finally:
            self._serving.discard(task)
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if not line:
            return
        said = msgspec.json.decode(line)
        number = int(said["room"])
        if self.rooms.fault(number) == "never":
            await reader.read()  # until the decode engine gives up
            return
        try:
            room = self.rooms.enter(number, "decode")
        except RoomRefused as error:
            writer.write(_line({"error": str(error)}))
            return
        try:
            if not room.joined.done():
                room.joined.set_result(Joined(said["checksum"], said["held_tokens"], said["prefill_rank"]))
            gone = asyncio.ensure_future(reader.read(1))
            await asyncio.wait((gone, room.handed), return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if room.handed.done():
                failure = room.handed.exception()
                answer: dict[str, object] = {"error": str(failure)}
                if failure is None:
                    answer = {"cached_tokens": room.handed.result().cached_tokens}
                writer.write(_line(answer))
                with suppress(ConnectionError):
                    await writer.drain()
        finally:
            self.rooms.leave(room, "decode")


async def take_over(meeting: Meeting, ids: TokenIds, held_tokens: int, timeout_s: float) -> Handed:
    """The decode side: joins the room and waits for the KV. Raises HandoverFailed."""
    said = {
        "room": meeting.room,
        "checksum": zlib.crc32(ids),
        "held_tokens": held_tokens,
        "prefill_rank": meeting.prefill_rank,
    }
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(meeting.host, meeting.port)
            writer.write(_line(said))
            answer = msgspec.json.decode(await reader.readline())
    except TimeoutError:
        raise HandoverFailed(f"room {meeting.room}: nothing was handed over within {timeout_s:g} s") from None
    except (OSError, msgspec.DecodeError) as error:
        raise HandoverFailed(f"room {meeting.room}: the prefill engine is gone ({error})") from None
    finally:
        if writer is not None:
            writer.close()
    if "error" in answer:
        raise HandoverFailed(str(answer["error"]))
    return Handed(int(answer["cached_tokens"]))


def _line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"

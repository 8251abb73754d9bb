"""ZMTP 3.0, the wire protocol below ZMQ sockets, as a subscriber speaks it. No I/O.

Why not libzmq: handing one message of three frames from its thread to Python was a quarter of what an event cost
(about 8 µs, against 0.8 here, both on a busy machine). What is spoken is what its SUB socket speaks to any
publisher since ZMQ 4.0 (2013): greeting, NULL security, READY, one subscription. Heartbeats (PING, of ZMTP 3.1) are
answered.
"""

from __future__ import annotations

import struct
from typing import Final

MAX_FRAME_BYTES: Final = 32 << 20
"""A larger frame ends the connection before anything of it is kept (case 9)."""
KEPT_FRAMES: Final = 4
"""No message in the contract has more; further frames are read and not kept."""
MAX_FRAMES: Final = 256
"""Of one message, and of commands in a row: whoever sends more has nothing to say and would hold up the event loop."""
MAX_COMMAND_BYTES: Final = 4096
SMALL_PIECE_BYTES: Final = 4096
TAKEN_BYTES: Final = 16 * 1024
"""Behind so many bytes of messages taken together no further one is: what they cost grows with these (case 31)."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_LAST = (_LONG, 0)  # flags of a message's last frame
_GREETING_BYTES = 64
_GREETING = _SIGNATURE + bytes((3, 0)) + b"NULL".ljust(20, b"\0") + bytes(32)
_PUBLISHERS = (b"PUB", b"XPUB")
_SHORT_SEQ = b"\x01\x08"  # the head of a frame of 8 bytes, more to follow
_NOT_ZMTP = "something accepts connections but does not speak ZMTP"
_seq_and_head = struct.Struct(">8sBQ")
_long_size = struct.Struct(">Q")

Message = tuple[bytes, bytes] | str
"""(second frame, third frame) of a message of three under exactly our topic; else what it was rejected for: `frames`
(another number of them) or `topic` (one that only begins with ours)."""


class ZmtpError(Exception):
    """The peer is no publisher we can hear, or broke the protocol. The connection is of no more use; the text says why,
    as something to follow "connection to the endpoint:"."""


def frame(body: bytes, *, more: bool = False, command: bool = False) -> bytes:
    """One frame as it goes over the wire."""
    flags = _MORE * more | _COMMAND * command
    if len(body) > 255:
        return bytes((flags | _LONG,)) + _long_size.pack(len(body)) + body
    return bytes((flags, len(body))) + body


class SubscriberWire:
    """One connection. Give it what arrives with `received`; then call `agree` until the handshake is `established` (the
    subscription is asked for by then), and afterwards `take` until it returns none. Both raise ZmtpError.

    Send `outgoing` whenever it is not empty, and clear it.
    """

    def __init__(self, topic: bytes) -> None:
        self.established = False
        self.outgoing = bytearray(_GREETING)
        self._topic = topic
        self._greeted = False
        # How nearly every message begins: compared in one step.
        self._usual = frame(topic, more=True) + _SHORT_SEQ
        self._data = b""
        self._at = 0
        self._parts: list[bytes | bytearray] = []  # arrived, and not enough for the frame that began
        self._missing = 0  # bytes of it
        self._frames: list[bytes] = []
        self._frame_count = 0

    def received(self, data: bytes) -> None:
        """Bytes in the order they came."""
        if self._missing > len(data):
            self._keep(data)
            self._missing -= len(data)
            return
        if self._parts:
            data = b"".join((*self._parts, data))
            self._parts.clear()
        elif self._at < len(self._data):
            data = self._data[self._at :] + data
        self._data, self._at, self._missing = data, 0, 0

    def _keep(self, data: bytes) -> None:
        """Of the frame that began. Small pieces in one buffer: each as an object of its own would take up many times
        its size, for as long as a publisher cares to drip."""
        if len(data) >= SMALL_PIECE_BYTES:
            self._parts.append(data)
        elif isinstance(last := self._parts[-1], bytearray):
            last += data
        else:
            self._parts.append(bytearray(data))

    def take(self, limit: int) -> list[Message]:
        """The next whole messages, at most `limit`, of about TAKEN_BYTES; none when more bytes are needed."""
        found: list[Message] = []
        if not self._frame_count:
            data, at, usual = self._data, self._at, self._usual
            size = len(data)
            to_body = len(usual) + _seq_and_head.size
            last = min(size - to_body, at + TAKEN_BYTES)
            while at <= last and data.startswith(usual, at):
                seq, flags, length = _seq_and_head.unpack_from(data, at + len(usual))
                body = at + to_body
                if not flags:  # a short frame's head has one byte for its length
                    body -= 7
                    length = data[body - 1]
                end = body + length
                if flags not in _LAST or end > size:
                    break
                found.append((seq, data[body:end]))
                at = end
                if len(found) == limit:
                    break
            self._at = at
        if not found and (message := self._next_by_frames()) is not None:
            found.append(message)
        return found

    def _next_by_frames(self) -> Message | None:
        commands = 0
        while (found := self._frame()) is not None:
            flags, body = found
            if flags & _COMMAND:
                commands += 1
                self._command(body)
            else:
                self._frame_count += 1
                if self._frame_count <= KEPT_FRAMES:
                    self._frames.append(body)
                if not flags & _MORE:
                    return self._message()
            if commands > MAX_FRAMES or self._frame_count > MAX_FRAMES:
                raise ZmtpError(f"more than {MAX_FRAMES} frames came that make no message")
        return None

    def _message(self) -> Message:
        frames, count = self._frames, self._frame_count
        self._frames, self._frame_count = [], 0
        if count != 3:
            return "frames"
        return (frames[1], frames[2]) if frames[0] == self._topic else "topic"

    def _frame(self) -> tuple[int, bytes] | None:
        data, at = self._data, self._at
        if len(data) < at + 2:
            return None
        flags = data[at]
        if flags > (_MORE | _LONG | _COMMAND) or (flags & _COMMAND and flags & _MORE):
            raise ZmtpError(_NOT_ZMTP)
        begin = at + 2
        size = data[at + 1]
        if flags & _LONG:
            begin = at + 9
            if len(data) < begin:
                return None
            (size,) = _long_size.unpack_from(data, at + 1)
        limit = MAX_COMMAND_BYTES if flags & _COMMAND else MAX_FRAME_BYTES
        if size > limit:
            raise ZmtpError(f"a frame of {size} bytes came; at most {limit} are read")
        end = begin + size
        if end > len(data):
            self._await(end - len(data))
            return None
        self._at = end
        return flags, data[begin:end]

    def _await(self, missing: int) -> None:
        """A frame goes on beyond what is here: its bytes are joined once, when all have come."""
        self._parts = [self._data[self._at :]]
        self._missing = missing
        self._data, self._at = b"", 0

    # ---- handshake

    def agree(self) -> None:
        """Goes on with the handshake, as far as what came allows."""
        if not self._greeted and not self._greet():
            return
        while not self.established and (found := self._frame()) is not None:
            flags, body = found
            if not flags & _COMMAND:
                raise ZmtpError(_NOT_ZMTP)
            self._command(body)

    def _greet(self) -> bool:
        data = self._data
        if data and (data[:1] != _SIGNATURE[:1] or data[9:10] not in (b"", _SIGNATURE[9:])):
            raise ZmtpError(_NOT_ZMTP)
        if len(data) > 10 and data[10] < 3:
            raise ZmtpError("the publisher speaks a ZMTP older than 3.0 (ZMQ before 4.0)")
        if len(data) < _GREETING_BYTES:
            return False
        if data[12:32].rstrip(b"\0") != b"NULL":
            raise ZmtpError("the publisher asks for ZMQ authentication, which is not supported")
        self._at = _GREETING_BYTES
        self._greeted = True
        self.outgoing += frame(b"\x05READY" + _property(b"Socket-Type", b"SUB"), command=True)
        return True

    def _command(self, body: bytes) -> None:
        name, rest = body[1 : 1 + body[0]] if body else b"", body[1 + body[0] :] if body else b""
        if name == b"PING":
            self.outgoing += frame(b"\x04PONG" + rest[2:18], command=True)
        elif name == b"READY" and not self.established:
            if _properties(rest).get(b"socket-type") not in _PUBLISHERS:
                raise ZmtpError("something accepts connections but is no ZMQ socket of the right kind")
            self.established = True
            self.outgoing += frame(b"\x01" + self._topic)
        elif name == b"ERROR":
            raise ZmtpError(f"the publisher refused the connection: {rest[1:81].decode('ascii', 'replace')}")
        # Others are for later versions: to be ignored.


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + struct.pack(">I", len(value)) + value


def _properties(body: bytes) -> dict[bytes, bytes]:
    """Names in lower case. Raises ZmtpError."""
    found: dict[bytes, bytes] = {}
    while body:
        name_end = 1 + body[0]
        value_at = name_end + 4
        if value_at > len(body):
            raise ZmtpError(_NOT_ZMTP)
        end = value_at + int.from_bytes(body[name_end:value_at], "big")
        if end > len(body):
            raise ZmtpError(_NOT_ZMTP)
        found[body[1:name_end].lower()] = body[value_at:end]
        body = body[end:]
    return found

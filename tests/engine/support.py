"""What a subscriber and a client of a simulated engine do, over loopback."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from router.engine.app import SimulatedEngine

TIMEOUT_S = 10.0
END_SEQ = b"\xff" * 8
Starter = Callable[..., Awaitable[SimulatedEngine]]


class Wire:
    """A subscriber's side of the sockets."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context

    def subscribe(self, port: int | None, topic: bytes = b"") -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, topic)
        socket.connect(f"tcp://127.0.0.1:{port}")
        return socket

    async def replay(self, port: int | None, start: int = 0) -> list[list[bytes]]:
        """Every reply up to and with the end mark, without the DEALER's empty frame."""
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://127.0.0.1:{port}")
            await socket.send_multipart([b"", struct.pack(">Q", start)])
            replies: list[list[bytes]] = []
            while not replies or replies[-1][-2] != END_SEQ:
                delimiter, *frames = await receive(socket)
                assert delimiter == b""
                replies.append(frames)
            return replies

    async def events(self, port: int | None) -> list[dict[str, Any]]:
        """All events of a rank so far, in order, read from its replay buffer."""
        replies = await self.replay(port)
        return [event for reply in replies[:-1] for event in msgspec.msgpack.decode(reply[2])[1]]


async def receive(socket: zmq.asyncio.Socket) -> list[bytes]:
    frames: list[bytes] = await asyncio.wait_for(socket.recv_multipart(), TIMEOUT_S)
    return frames

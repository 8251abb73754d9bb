"""The sockets of one data-parallel rank: events PUB, replay ROUTER, load PUB, framed as SGLang 0.5.23 frames them."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Iterator

import msgspec
import zmq
import zmq.asyncio

from router.engine.scheduler import Load

END_SEQ = b"\xff" * 8
_PORT_TRIES = 200
_REPLAY_SLICE = 256
_encode = msgspec.msgpack.Encoder().encode


def bind_range(
    context: zmq.asyncio.Context, kind: int, host: str, base: int, count: int, *, send_limit: int
) -> list[zmq.asyncio.Socket]:
    """Bind `count` sockets to consecutive ports from `base`; base 0 finds a free run. OSError when a port is taken.

    `send_limit` messages wait for a slow reader; more are dropped (PUB and ROUTER never block).
    """
    address = f"[{host}]" if ":" in host else host
    for _ in range(_PORT_TRIES if base == 0 else 1):
        sockets: list[zmq.asyncio.Socket] = []
        try:
            for offset in range(count):
                socket = context.socket(kind)
                sockets.append(socket)
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.SNDHWM, send_limit)
                socket.setsockopt(zmq.IPV6, ":" in host)
                port = base + offset if base else (port_of(sockets[0]) + offset if offset else 0)
                socket.bind(f"tcp://{address}:{port or '*'}")
            return sockets
        except zmq.ZMQError as error:
            for socket in sockets:
                socket.close()
            if base or error.errno != zmq.EADDRINUSE:
                raise OSError(f"cannot bind tcp://{address}:{base} … {base + count - 1}: {error}") from error
    raise OSError(f"no {count} consecutive free ports on {host}")


def port_of(socket: zmq.asyncio.Socket) -> int:
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rsplit(":", 1)[1])


class EventPublisher:
    """Numbers batches from 0, sends each once, and keeps the last `buffer_batches` for replay."""

    def __init__(
        self,
        publish: zmq.asyncio.Socket,
        replay: zmq.asyncio.Socket | None,
        *,
        topic: str,
        buffer_batches: int,
    ) -> None:
        self._publish: zmq.Socket[bytes] = zmq.Socket.shadow(publish)
        self._replay = replay
        self._topic = topic.encode()
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._seq = 0

    def send(self, payload: bytes) -> None:
        """Publish one batch. A PUB socket never blocks: a subscriber that does not read loses batches."""
        self._buffer.append((self._seq, payload))
        self._publish.send_multipart([self._topic, struct.pack(">Q", self._seq), payload], zmq.DONTWAIT)
        self._seq += 1

    async def serve_replay(self) -> None:
        """Answer replay requests for ever; a request that is not `[b"", 8 bytes]` is ignored."""
        socket = self._replay
        if socket is None:
            return
        while True:
            peer, *frames = await socket.recv_multipart()
            if len(frames) == 2 and frames[0] == b"" and len(frames[1]) == 8:
                (start,) = struct.unpack(">Q", frames[1])
                await self._answer(socket, peer, start)

    async def _answer(self, socket: zmq.asyncio.Socket, peer: bytes, start: int) -> None:
        """`[topic, seq, payload]` for everything still held from `start` on, then the end mark `["", ff…, ""]`."""
        for count, (seq, payload) in enumerate(self._held_from(start), 1):
            await socket.send_multipart([peer, b"", self._topic, struct.pack(">Q", seq), payload])
            if count % _REPLAY_SLICE == 0:
                await asyncio.sleep(0)
        await socket.send_multipart([peer, b"", b"", END_SEQ, b""])

    def _held_from(self, start: int) -> Iterator[tuple[int, bytes]]:
        return iter([held for held in self._buffer if held[0] >= start])


class LoadPublisher:
    """LoadStat messages of one rank: `report` sends on change, the caller calls it once a second with force=True."""

    def __init__(self, publish: zmq.asyncio.Socket, rank: int, *, time_scale: float) -> None:
        self._publish: zmq.Socket[bytes] = zmq.Socket.shadow(publish)
        self._rank = rank
        self._time_scale = time_scale
        self._seq = 0
        self._last: Load | None = None

    def report(self, load: Load, *, force: bool = False) -> None:
        if load == self._last and not force:
            return
        self._last = load
        busy_us = int(load.total_prefill_busy_s * self._time_scale * 1e6)
        message = (
            "LoadStat",
            load.running,
            load.waiting,
            load.kv_tokens_used,
            load.kv_capacity,
            self._rank,
            load.waiting_uncached_tokens,
            load.used_plus_queued_tokens,
            load.max_running,
            load.total_prefill_uncached_tokens,
            busy_us,
        )
        self._publish.send_multipart([b"load", struct.pack(">Q", self._seq), _encode(message)], zmq.DONTWAIT)
        self._seq += 1

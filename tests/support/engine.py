"""A scriptable engine for tests: real HTTP and real ZMQ publishers on loopback, in the test's own event loop."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import zmq
from aiohttp import web

from tests.support.waiting import until

HOST = "127.0.0.1"
END_SEQ = b"\xff" * 8
PORTS = range(20000, 32000, 16)
_turns = itertools.count(time.time_ns() // 1000)


def free_ports(count: int) -> int:
    """The first of `count` consecutive loopback ports that are free now; the same again only after all others."""
    for turn in itertools.islice(_turns, len(PORTS)):
        base = PORTS[turn % len(PORTS)]
        sockets = []
        try:
            for port in range(base, base + count):
                sockets.append(socket.socket())
                sockets[-1].bind((HOST, port))
        except OSError:
            continue
        finally:
            for one in sockets:
                one.close()
        return base
    raise RuntimeError("no free ports")


def stored(hashes: Sequence[int], tokens: Sequence[int], width: int, parent: int | None = None) -> dict[str, Any]:
    """A BlockStored as SGLang 0.5.23 sends it."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": width,
        "lora_id": None,
        "medium": "GPU",
    }


def _bound(publisher: zmq.Socket[bytes], endpoint: str) -> bool:
    """ZMQ gives a closed socket's port back in its own time."""
    try:
        publisher.bind(endpoint)
    except zmq.ZMQError as error:
        if error.errno != zmq.EADDRINUSE:
            raise
        return False
    return True


class FakeEngine:
    """`info` (the /server_info body), and `statuses`, `bodies` and `delays` (s) by path may be changed at any time.

    With `replay`, a ROUTER a rank answers from the last `replay` batches of the present publisher process.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], *, dp_size: int = 1, block_size: int = 4, replay: int = 0
    ) -> None:
        self.port = free_ports(1)
        self.url = f"http://{HOST}:{self.port}"
        self.kv_base = free_ports(dp_size)
        self.load_base = free_ports(dp_size)
        self.replay_base = free_ports(dp_size)
        self.buffers: list[deque[tuple[int, bytes]]] = [deque(maxlen=replay) for _ in range(dp_size)]
        self.dp_size = dp_size
        self.statuses: dict[str, int] = {"/get_server_info": 404, "/version": 404}
        self.bodies: dict[str, bytes] = {}
        self.delays: dict[str, float] = {}
        self.requests: list[tuple[str, str | None]] = []
        """(path, Authorization) of every request."""
        self.headers: dict[str, Mapping[str, str]] = {}
        """Of the last request by path; case-insensitive."""
        self.next_seq = [1] * dp_size
        self.info: dict[str, Any] = {
            "model_path": "/models/tiny",
            "served_model_name": "tiny",
            "version": "0.5.23",
            "dp_size": dp_size,
            "max_total_num_tokens": 1000,
            "disaggregation_mode": "null",
            "startup_time": {"tokenizer_e2e": 1.5},
            "kv_events": {
                "publisher": "zmq",
                "endpoint_host": "*",
                "endpoint_port_base": self.kv_base,
                "topic": "",
                "block_size": block_size,
                "dp_size": dp_size,
            },
        }
        if replay:
            self.info["kv_events"]["replay_endpoint_port_base"] = self.replay_base
        self._replay = replay
        self._replaying: dict[int, asyncio.Task[None]] = {}
        self._context = context
        self._publishers: dict[int, zmq.Socket[bytes]] = {}
        self._subscriptions: dict[int, bytearray] = {}
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        await self.start_http()
        for rank in range(self.dp_size):
            await self.open_publisher(rank)
            if self._replay:
                await self.open_replay(rank)

    async def stop(self) -> None:
        await self.stop_http()
        for rank in list(self._publishers):
            self.close_publisher(rank)
        for rank in list(self._replaying):
            await self.close_replay(rank)

    # ---- HTTP

    async def start_http(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, self.port, reuse_address=True).start()

    async def stop_http(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def asked(self, path: str) -> int:
        return sum(1 for seen, _ in self.requests if seen == path)

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.path
        self.requests.append((path, request.headers.get("Authorization")))
        self.headers[path] = request.headers
        if path in self.delays:
            await asyncio.sleep(self.delays[path])
        status = self.statuses.get(path, 200)
        body = self.bodies.get(path)
        if body is None and path in ("/server_info", "/get_server_info"):
            body = msgspec.json.encode(self.info)
        headers = {"Location": "http://127.0.0.2:1/"} if 300 <= status < 400 else {}
        content_type = "application/json" if body and body[:1] in b"{[" else None
        return web.Response(status=status, body=body or b"", headers=headers, content_type=content_type)

    # ---- events

    async def open_publisher(self, rank: int = 0, next_seq: int | None = None) -> None:
        publisher = self._context.socket(zmq.XPUB)
        publisher.linger = 0
        publisher.setsockopt(zmq.XPUB_VERBOSER, 1)
        endpoint = f"tcp://{HOST}:{self.kv_base + rank}"
        await until(lambda: _bound(publisher, endpoint), f"{endpoint} is free")
        self._publishers[rank], self._subscriptions[rank] = publisher, bytearray()
        if next_seq is not None:
            self.restarted(rank, next_seq)

    def close_publisher(self, rank: int = 0) -> None:
        self._publishers.pop(rank).close(0)

    def restarted(self, rank: int, next_seq: int) -> None:
        """Another process numbers from here on; its replay buffer is empty."""
        self.next_seq[rank] = next_seq
        self.buffers[rank].clear()

    async def open_replay(self, rank: int = 0) -> None:
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.set_hwm(0)
        endpoint = f"tcp://{HOST}:{self.replay_base + rank}"
        await until(lambda: _bound(router, endpoint), f"{endpoint} is free")
        self._replaying[rank] = asyncio.create_task(self._serve_replay(router, rank))

    async def close_replay(self, rank: int = 0) -> None:
        task = self._replaying.pop(rank)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _serve_replay(self, router: zmq.Socket[bytes], rank: int) -> None:
        with router:
            while True:
                with suppress(zmq.Again):
                    client, empty, start = router.recv_multipart(zmq.NOBLOCK)
                    for seq, payload in self.buffers[rank]:
                        if seq >= int.from_bytes(start, "big"):
                            router.send_multipart([client, empty, seq.to_bytes(8, "big"), payload])
                    router.send_multipart([client, empty, END_SEQ, b""])
                await asyncio.sleep(0.005)

    def subscriptions(self, rank: int = 0) -> int:
        """Subscriptions minus unsubscriptions this publisher has seen since it was opened."""
        return self._heard(rank).count(1) - self._heard(rank).count(0)

    def subscriptions_ever(self, rank: int = 0) -> int:
        """Subscriptions this publisher has seen since it was opened."""
        return self._heard(rank).count(1)

    def _heard(self, rank: int) -> bytearray:
        """The first byte of every subscription message: 1 subscribes, 0 unsubscribes."""
        publisher = self._publishers[rank]
        while publisher.poll(0):
            self._subscriptions[rank] += publisher.recv(zmq.NOBLOCK)[:1]
        return self._subscriptions[rank]

    async def listened(self, rank: int = 0) -> None:
        """Returns once somebody is subscribed to this rank."""
        await until(lambda: self.subscriptions(rank) > 0, f"a subscription to rank {rank}")

    def publish(
        self, *events: dict[str, Any], rank: int = 0, says_rank: int | None = None, dropped: bool = False
    ) -> None:
        """One batch. `says_rank` is the rank it names, if not its own."""
        payload = msgspec.msgpack.encode([time.time(), list(events), rank if says_rank is None else says_rank])
        self.publish_raw(payload, rank=rank, dropped=dropped)

    def publish_raw(self, payload: bytes, rank: int = 0, dropped: bool = False) -> None:
        """`dropped`: numbered, kept for replay, and lost at the high-water mark."""
        seq = self.next_seq[rank]
        self.next_seq[rank] = seq + 1
        self.buffers[rank].append((seq, payload))
        if not dropped:
            self.send(seq, payload, rank)

    def send(self, seq: int, payload: bytes, rank: int = 0, topic: bytes | None = None) -> None:
        """Exactly this message."""
        if topic is None:
            topic = self.info["kv_events"]["topic"].encode()
        self._publishers[rank].send_multipart([topic, seq.to_bytes(8, "big"), payload])

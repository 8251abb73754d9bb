"""Floods and hostile bytes on one engine's event stream: the router stays responsive, in bounded memory, and goes on.

The router and the publisher are processes of their own, everything goes over real sockets; what is measured is what a
client of /health sees meanwhile, less the time in which other processes had the core (the kernel's run-queue delay of
the router's loop and of the client).
"""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import os
import struct
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from tests.index.streams import CHAIN, HASHES, PROMPT
from tests.support.engine import FakeEngine, stored
from tests.support.process import RouterProcess, router
from tests.support.waiting import until

P99_S = 0.05
LIMIT_S = 60.0
BLOCKS_PER_EVENT = 16
MAX_BLOCKS = 100_000


def _hashes(count: int) -> list[int]:
    return array("q", os.urandom(8 * count)).tolist()


def _batch(*events: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb([time.time(), list(events)])
    return packed


def _stores(blocks: int) -> dict[str, Any]:
    return stored(_hashes(blocks), [7] * 4 * blocks, 4)


def burst(events: int) -> Iterator[bytes]:
    """Unique chains, eight events a message."""
    for _ in range(events // 8):
        yield _batch(*(_stores(BLOCKS_PER_EVENT) for _ in range(8)))


def hostile(times: int) -> Iterator[bytes]:
    """Case 24: removals of unknown hashes. Case 9: length prefixes that promise ten million hashes, with and without
    the bytes, and deep nesting; last a frame of 200 MiB."""
    for _ in range(1000):
        yield _batch({"type": "BlockRemoved", "block_hashes": _hashes(1000), "medium": "GPU"})
    head = b"\x92\xcb" + bytes(8) + b"\x91\x82\xa4type\xabBlockStored\xacblock_hashes"
    ten_million = b"\xdd" + struct.pack(">I", 10_000_000)
    for _ in range(times):
        yield head + ten_million
        yield head + ten_million + bytes(10_000_000)
        yield b"\x92\xcb" + bytes(8) + b"\x91" * 5_000
        yield b"\x81" * 5_000
        yield b"\x92\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff"
        yield _batch({"type": "BlockStored", "block_hashes": [[1]] * 70_000, "token_ids": [], "block_size": 4})
    yield bytes(200 << 20)


FLOODS: dict[str, Callable[[int], Iterator[bytes]]] = {"burst": burst, "hostile": hostile}


def publish(port: int, name: str, size: int, first_seq: int, go: Any, done: Any) -> None:
    """Runs in a process: a publisher that never drops. A flood is made first, then sent as fast as the router reads."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.XPUB)
    socket.set_hwm(0)
    socket.bind(f"tcp://127.0.0.1:{port}")
    socket.recv()

    def send(payload: bytes) -> None:
        nonlocal first_seq
        socket.send_multipart([b"", first_seq.to_bytes(8, "big"), payload], copy=False)
        first_seq += 1

    messages = list(FLOODS[name](size))
    send(_batch(stored(HASHES, CHAIN, 4)))
    go.wait(LIMIT_S)
    for payload in messages:
        send(payload)
    if name == "hostile":
        socket.recv()  # the router hung up on it
        socket.recv()  # and is back
    send(_batch({"type": "AllBlocksCleared"}, stored(HASHES, CHAIN, 4)))
    done.value = first_seq - 1
    go.clear()
    go.wait(LIMIT_S)
    context.destroy(linger=0)


class Flood:
    """One flood in front of one router. `last_seq` is the number of the sound batch that ends it."""

    def __init__(self, engine: FakeEngine, running: RouterProcess, go: Any, done: Any) -> None:
        self.engine = engine
        self.router = running
        self._go = go
        self._done = done
        self.latencies_s: list[float] = []
        self.raw_s: list[float] = []
        self.peak_rss = self.rss()

    def rss(self) -> int:
        return int(Path(f"/proc/{self.router.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    async def rank(self) -> dict[str, Any]:
        rank: dict[str, Any] = (await asyncio.to_thread(self.router.ranks))[0]
        return rank

    async def until(self, seen: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        rank: dict[str, Any] = {}

        async def it_is() -> bool:
            nonlocal rank
            ranks = await asyncio.to_thread(self.router.ranks)
            rank = ranks[0] if ranks else {"state": "not described yet", "last_seq": None}
            return seen(rank)

        await until(it_is, lambda: f"{what}; {rank}", LIMIT_S, 0.05)
        return rank

    async def run(self) -> float:
        """Sends it all, measuring /health until the last batch is applied. Returns the seconds that took."""
        self._go.set()
        started = time.monotonic()
        await asyncio.to_thread(self._poll_health)
        return time.monotonic() - started

    def _is_over(self) -> bool:
        return bool(self._done.value) and self.router.ranks()[0]["last_seq"] == self._done.value

    def _poll_health(self) -> None:
        host, port = self.router.base.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            waited_s, began = self._waited_s(), time.perf_counter()
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            self.raw_s.append(time.perf_counter() - began)
            self.latencies_s.append(max(0.0, self.raw_s[-1] - (self._waited_s() - waited_s)))
            assert answer.status == 200
            self.peak_rss = max(self.peak_rss, self.rss())
            if len(self.latencies_s) % 25 == 0 and self._is_over():
                connection.close()
                return
            time.sleep(0.002)  # a client's pace, not a wait for something
        raise AssertionError(f"the flood was not over in {LIMIT_S} s: {self.router.ranks()}")

    def _waited_s(self) -> float:
        """How long the router's loop and this thread were ready to run and had no core, so far."""
        tasks = (f"/proc/{self.router.pid}/task/{self.router.pid}/schedstat", "/proc/thread-self/schedstat")
        return sum(int(Path(task).read_text().split()[1]) for task in tasks) / 1e9

    def check_responsive(self) -> None:
        assert p99(self.latencies_s) < P99_S, f"raw {p99(self.raw_s):.3f} s"

    async def credit(self) -> int:
        body = {"model": "tiny", "prompt": PROMPT}
        decision = await asyncio.to_thread(self.router.route, "/v1/completions", body)
        return int(max(decision["candidates"][0]["cached_tokens"].values()))


def p99(latencies_s: list[float]) -> float:
    return sorted(latencies_s)[int(0.99 * len(latencies_s))]


@contextmanager
def publisher(port: int, name: str, size: int) -> Iterator[tuple[Any, Any]]:
    spawn = multiprocessing.get_context("spawn")
    go, done = spawn.Event(), spawn.Value("q", 0)
    running = spawn.Process(target=publish, args=(port, name, size, 1, go, done), daemon=True)
    running.start()
    try:
        yield go, done
    finally:
        go.set()
        running.join(2)
        running.kill()


@asynccontextmanager
async def flood(
    engine: FakeEngine, folder: Path, name: str, size: int, *, max_blocks: int = 2_000_000
) -> AsyncIterator[Flood]:
    with publisher(engine.kv_base, name, size) as (go, done):
        index = {"max_blocks": 2_000_000, "max_blocks_per_rank": max_blocks}
        settings = {"fleet": {"probe_interval_s": 1.0}, "timeouts": {"drain_s": 0.0, "grace_s": 0.0}}
        with router(folder, [engine.url], index=index, **settings) as running:
            made = Flood(engine, running, go, done)
            await made.until(lambda rank: rank["state"] == "live" and rank["last_seq"] == 1, "a live stream")
            yield made


@pytest.fixture
async def engine(fake_engine: Callable[..., Awaitable[FakeEngine]]) -> FakeEngine:
    """Its HTTP only: the publisher is a process of its own."""
    made = await fake_engine(block_size=4)
    made.close_publisher(0)
    return made


async def test_a_burst_of_100k_events_leaves_health_below_50_ms(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 31; 1.6 million blocks."""
    async with flood(engine, tmp_path, "burst", 100_000) as made:
        took_s = await made.run()
        rank = await made.rank()
        assert (rank["state"], rank["gaps"], rank["batches_lost"]) == ("live", 0, 0)
        assert rank["ledger"]["stored_blocks"] == 100_000 * BLOCKS_PER_EVENT + 2 * len(HASHES)
        assert await made.credit() == 24
        _say(capsys, "100k events", made, took_s)
        made.check_responsive()


async def test_hostile_streams_cost_bounded_memory_and_nobody_waits(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cases 9, 24 and 104: the sound batch that comes after all of it counts."""
    async with flood(engine, tmp_path, "hostile", 3) as made:
        before = made.rss()
        took_s = await made.run()
        _say(capsys, "a million unknown removals, false lengths, 200 MiB", made, took_s)
        assert await made.credit() == 24
        assert made.peak_rss - before < 100 << 20
        made.check_responsive()


async def test_unique_blocks_without_end_stop_at_the_ranks_cap(
    engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 104: 640,000 blocks against a cap of 100,000."""
    async with flood(engine, tmp_path, "burst", 40_000, max_blocks=MAX_BLOCKS) as made:
        before = made.rss()
        took_s = await made.run()
        _say(capsys, "640k unique blocks, cap 100k", made, took_s)
        rank = await made.rank()
        assert rank["ledger"]["refused_blocks"] > 500_000
        assert made.peak_rss - before < 100 << 20
        made.check_responsive()
        assert await made.credit() == 24


def _say(capsys: pytest.CaptureFixture[str], what: str, made: Flood, took_s: float) -> None:
    with capsys.disabled():
        print(
            f"\n{what}: {took_s:.1f} s; /health p99 {p99(made.latencies_s) * 1e3:.1f} ms, max "
            f"{max(made.latencies_s) * 1e3:.1f} of {len(made.raw_s)} (with waits for a core: "
            f"{p99(made.raw_s) * 1e3:.1f}, {max(made.raw_s) * 1e3:.1f}), peak RSS {made.peak_rss >> 20} MiB"
        )

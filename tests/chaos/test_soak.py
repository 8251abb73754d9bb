"""Long runs, on request: `pytest -m soak tests/chaos/test_soak.py`; KV_ROUTER_SOAK_S sets their length (600 s)."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.chaos.engines import ChaosEngine
from tests.support.http import RawClient, Reply, Seen, post
from tests.support.process import RouterProcess, is_up, router
from tests.support.waiting import until

pytestmark = pytest.mark.soak

STREAMS = 256
LENGTH_S = float(os.environ.get("KV_ROUTER_SOAK_S", "600"))
EVERY_S = 0.25
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" token"}}]}\n\n'


def rss_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def pid_of(running: RouterProcess) -> int:
    """The process that listens on the router's public port."""
    wanted = f"{int(running.base.rsplit(':', 1)[1]):04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = [row[9] for row in rows if row[1].endswith(f":{wanted}") and row[3] == "0A"]
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(entry) == f"socket:[{inode}]":
                return int(entry.parts[2])
        except OSError:
            continue
    raise AssertionError("nobody listens there")


async def test_256_streams_for_ten_minutes_without_an_error_or_a_leak(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(1)
    end = time.monotonic() + LENGTH_S

    async def answer(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        for _ in range(chance.randrange(20, 600)):
            await reply.chunk(EVENT)
            await asyncio.sleep(EVERY_S)
            if time.monotonic() > end:
                break
        await reply.chunk(b"data: [DONE]\n\n")
        await reply.end_stream()

    engines = [await ChaosEngine.running(answer) for _ in range(4)]
    tally = {"complete": 0, "broken": 0, "chunks": 0}

    async def client(port: int) -> None:
        while time.monotonic() < end:
            connection = await RawClient.to(port)
            await connection.send(post("/v1/completions", b'{"model":"tiny","prompt":"x","stream":true}'))
            got = await connection.answer()
            whole = got.status == 200 and got.complete and got.body.endswith(b"data: [DONE]\n\n")
            tally["complete" if whole else "broken"] += 1
            tally["chunks"] += got.body.count(b"data: ")
            connection.leave()

    with router(tmp_path, [engine.url for engine in engines]) as running:
        port = int(running.base.rsplit(":", 1)[1])
        pid = pid_of(running)
        await until(lambda: is_up(f"{running.base}/ready"), "ready", 30)
        before = descriptors(pid)
        clients = [asyncio.create_task(client(port)) for _ in range(STREAMS)]
        samples = []
        while time.monotonic() < end:
            await asyncio.sleep(min(5.0, LENGTH_S / 30))
            samples.append(rss_mb(pid))
        await asyncio.gather(*clients)
        metrics = await asyncio.to_thread(running.metrics)
        ranks = await asyncio.to_thread(running.ranks)
        await until(lambda: descriptors(pid) <= before + 8, "sockets are closed", 15)
        after = descriptors(pid)
    for engine in engines:
        await engine.close()
    third = len(samples) // 3
    early, late = samples[third : 2 * third], samples[2 * third :]
    with capsys.disabled():
        print(
            f"\n{STREAMS} streams, {LENGTH_S:.0f} s: {tally}, RSS MB first {samples[0]:.1f}, middle third max "
            f"{max(early):.1f}, last third max {max(late):.1f}, fds {before} -> {after}"
        )
    assert tally["broken"] == 0
    assert tally["complete"] >= STREAMS
    assert max(late) <= max(early) * 1.03 + 1
    assert sum(rank["inflight_requests"] for rank in ranks) == 0
    ok = re.search(r'requests_total\{outcome="ok",route="/v1/completions"\} ([0-9.e+]+)', metrics)
    assert ok is not None
    assert float(ok[1]) == tally["complete"]


SLOW_READERS = 100
OFFERED_MIB = 50


async def test_100_slow_readers_cost_bounded_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case 77: each reads 1 KiB/s of 50 MiB; the workers are held back instead."""
    piece = b"x" * 65536
    sent = 0

    async def answer(seen: Seen, reply: Reply) -> None:
        nonlocal sent
        await reply.begin_stream(kind="application/octet-stream")
        for _ in range(OFFERED_MIB << 4):
            await reply.chunk(piece)
            sent += len(piece)

    engines = [await ChaosEngine.running(answer) for _ in range(4)]
    with router(tmp_path, [engine.url for engine in engines]) as running:
        port = int(running.base.rsplit(":", 1)[1])
        pid = pid_of(running)
        await until(lambda: is_up(f"{running.base}/ready"), "ready", 30)
        before = rss_mb(pid)
        clients = [await RawClient.to(port, limit=4096) for _ in range(SLOW_READERS)]
        for client in clients:
            await client.send(post("/v1/completions", b'{"model":"tiny","prompt":"x"}'))
        most, end = 0.0, time.monotonic() + 15
        while time.monotonic() < end:
            await asyncio.gather(*(client.reader.read(1024) for client in clients))
            await asyncio.sleep(1)
            most = max(most, rss_mb(pid))
        answers = await asyncio.to_thread(running.ranks)
        for client in clients:
            client.leave()
        await until(lambda: sum(engine.open for engine in engines) == 0, "the workers were told", 10)
    for engine in engines:
        await engine.close()
    with capsys.disabled():
        print(
            f"\n{SLOW_READERS} slow readers of {OFFERED_MIB} MiB: router RSS {before:.1f} -> at most {most:.1f} MB, "
            f"workers got rid of {sent / 2**20:.0f} of {SLOW_READERS * OFFERED_MIB} MiB"
        )
    assert sum(rank["inflight_requests"] for rank in answers) == SLOW_READERS
    assert most - before < 64

"""Chaos among processes, on request (`pytest -m soak`): simulated engines are killed, paused, ended and started again
under load. KV_ROUTER_CHAOS_S and KV_ROUTER_CHAOS_SEED set length and seed."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.http import RawClient, post
from tests.support.process import RouterProcess, free_ports, is_up, router
from tests.support.waiting import until

pytestmark = pytest.mark.soak

SEED = int(os.environ.get("KV_ROUTER_CHAOS_SEED", "3"))
LENGTH_S = float(os.environ.get("KV_ROUTER_CHAOS_S", "60"))
ENGINES, CLIENTS = 3, 24
DONE = b"data: [DONE]\n\n"


class EngineProcess:
    """One `kv-router engine`; every method leaves it in a known state."""

    def __init__(self, port: int, log: Path) -> None:
        self.port = port
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "router", "engine", "--port", str(self.port), "--kv-port", str(self.port + 1)]
        command += ["--replay-port", str(self.port + 2), "--load-port", str(self.port + 3), "--model", "tiny"]
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def end(self, number: int) -> None:
        """And wait until it is gone: its port refuses from here on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(5)
            self._process = None


async def one_request(port: int, chance: random.Random) -> str:
    """What the client saw; the same words as in test_faults."""
    stream = chance.random() < 0.6
    prompt = [chance.randrange(1, 4000) for _ in range(chance.choice((20, 200, 800)))]
    body = f'{{"model":"tiny","prompt":{prompt},"max_tokens":{chance.randrange(2, 40)},"stream":{str(stream).lower()}}}'
    client = await RawClient.to(port)
    patience_s = chance.random() * 0.3 if chance.random() < 0.15 else 60.0
    try:
        await client.send(post("/v1/completions", body.encode(), "Content-Type: application/json\r\n"))
        answer = await asyncio.wait_for(client.answer(), patience_s)
    except TimeoutError:
        assert patience_s < 1, "a request was lost without an error"
        return "left"
    except (ConnectionError, asyncio.IncompleteReadError):
        return "no answer"
    finally:
        client.leave()
    if not answer.complete:
        return "cut"
    if answer.status < 400:
        assert not stream or answer.body.endswith(DONE) or b'"error"' in answer.body, "looks complete and is not"
        return "complete" if answer.body.endswith(DONE) or not stream else "error event"
    return f"{answer.status} {answer.one('x-kv-router-error') or 'of the engine'}"


async def trouble(engines: list[EngineProcess], chance: random.Random, done: Counter[str], end: float) -> None:
    while time.monotonic() < end:
        await asyncio.sleep(chance.uniform(0.5, 2.0))
        engine = chance.choice(engines)
        what = chance.choice(("kill", "kill", "pause", "pause", "terminate", "refuse"))
        done[what] += 1
        if what == "pause":
            engine.signal(signal.SIGSTOP)
            await asyncio.sleep(chance.choice((0.3, 1.0, 4.0)))
            engine.signal(signal.SIGCONT)
            continue
        number = signal.SIGTERM if what == "terminate" else signal.SIGKILL
        await asyncio.to_thread(engine.end, number)
        if what == "refuse":
            await asyncio.sleep(chance.uniform(1.0, 3.0))
        engine.start()


def counted(running: RouterProcess, outcome: str) -> int:
    pattern = rf'requests_total\{{outcome="{outcome}",route="/v1/completions"\}} ([0-9.e+]+)'
    found = re.search(pattern, running.metrics())
    return int(float(found[1])) if found else 0


async def test_engines_die_pause_and_return_under_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(SEED)
    base = free_ports(4 * ENGINES)
    engines = [EngineProcess(base + 4 * at, tmp_path / f"engine{at}.log") for at in range(ENGINES)]
    seen, did = Counter[str](), Counter[str]()
    try:
        for engine in engines:
            engine.start()
        await until(lambda: all(is_up(f"{engine.url}/health") for engine in engines), "engines up", 60)
        with router(
            tmp_path,
            [engine.url for engine in engines],
            timeouts={"idle_s": 2, "connect_s": 1},
            fleet={"probe_interval_s": 0.5, "probe_timeout_s": 1.5},
        ) as running:
            port = int(running.base.rsplit(":", 1)[1])
            await until(lambda: is_up(f"{running.base}/ready"), "ready", 60)
            end = time.monotonic() + LENGTH_S

            async def client(own: random.Random) -> None:
                while time.monotonic() < end:
                    seen[await one_request(port, own)] += 1
                    await asyncio.sleep(own.random() * 0.1)

            crowd = (client(random.Random(SEED * 1000 + at)) for at in range(CLIENTS))
            await asyncio.gather(trouble(engines, chance, did, end), *crowd)
            outcomes = ("ok", "client_closed", "rejected", "upstream_error", "stream_error")
            sent = sum(seen.values())
            await until(lambda: sum(counted(running, outcome) for outcome in outcomes) == sent, "every end counted", 10)
            ends = {outcome: counted(running, outcome) for outcome in outcomes}
            inflight = sum(rank["inflight_requests"] for rank in running.ranks())
            await until(lambda: {w["state"] for w in running.workers()} == {"ready"}, "all back", 40)
    finally:
        for engine in engines:
            engine.end(signal.SIGKILL)
    with capsys.disabled():
        print(
            f"\nseed {SEED}, {LENGTH_S:.0f} s, {dict(did)}: {sent} requests; clients saw {dict(sorted(seen.items()))}"
        )
        print(f"router counted {ends}; load left {inflight}")
    assert seen["no answer"] == 0
    assert not any(key.startswith("500 internal") for key in seen)
    assert inflight == 0
    assert ends["ok"] >= seen["complete"]
    assert ends["stream_error"] >= seen["cut"]

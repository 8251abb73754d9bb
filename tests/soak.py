"""A router under load beside engines that die, freeze, forget and come back: `python -m tests.soak --minutes 30`.

It ends with a tally and exit status 0 when, over the whole time, the router's memory was flat, no request was lost from
its counts, and no socket, task or in-flight count was left behind. Everything runs on loopback, without a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from router.config import Overrides, load_config
from router.service import Service
from tests.support.process import free_ports

ENGINES = 3
CLIENTS = 6
FAULT_EVERY_S = 8.0
SAMPLE_EVERY_S = 2.0
SETTLE_S = 90.0
CACHE_MB = 8
"""Of earlier turns: so little that it is full, and turning over, before memory is compared."""
WARM_SHARE = 0.4
"""Of the time: memory is compared from here on. Allocators and bounded caches fill up before."""
WORDS = ["river", "copper", "violet", "planet", "tenant", "because", "however", "return", "yield", "window", "prefix"]


def serve(path: Path) -> None:
    """The router's process: one line with its listeners, then one with its tasks for every SIGUSR1."""

    async def run() -> None:
        service, stop, loop = Service(load_config(path, Overrides())), asyncio.Event(), asyncio.get_running_loop()
        await service.start()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGUSR1, lambda: print(len(asyncio.all_tasks()), flush=True))
        print(json.dumps([service.listener.port, service.admin_port]), flush=True)
        await stop.wait()
        await service.stop(1.0)
        print(len(asyncio.all_tasks()), flush=True)

    asyncio.run(run())


class Child:
    """A process of ours whose lines of output can be awaited."""

    def __init__(self, *command: str, log: Path) -> None:
        self._command = command
        self._log = log
        self.process: asyncio.subprocess.Process

    async def start(self) -> str:
        with self._log.open("ab") as errors:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", *self._command, stdout=asyncio.subprocess.PIPE, stderr=errors
            )
        return await self.line()

    async def line(self) -> str:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), SETTLE_S)
        if not line:
            raise RuntimeError(f"{self._command} ended: {self._log.read_text()[-1500:]}")
        return line.decode()

    async def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)
            await self.process.wait()


@dataclass
class Sample:
    at_s: float
    rss: int
    descriptors: int
    tasks: int


@dataclass
class Tally:
    """What was done and seen from outside."""

    sent: Counter[str] = field(default_factory=Counter)
    """Requests by what became of them."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Soak:
    def __init__(self, minutes: float, tolerance: float, folder: Path, seed: int = 1) -> None:
        self._length_s = minutes * 60
        self._tolerance = tolerance
        self._rng = random.Random(seed)
        self._folder = folder
        self._base = free_ports(4 * ENGINES)
        self._engines = [self._engine(number) for number in range(ENGINES)]
        self._urls = [f"http://127.0.0.1:{self._base + 4 * number}" for number in range(ENGINES)]
        self._router = Child("tests.soak", "--serve", str(folder / "router.yaml"), log=folder / "router.log")
        self._base_url = self._admin = ""
        self._over = asyncio.Event()
        self.tally = Tally()

    def _engine(self, number: int) -> Child:
        port = self._base + 4 * number
        flags = f"--port {port} --kv-port {port + 1} --replay-port {port + 2} --load-port {port + 3} --tokens 30000"
        flags += " --time-scale 0.2 --prefill-tokens-per-s 8000"
        return Child("router", "engine", *flags.split(), log=self._folder / f"engine{number}.log")

    # ---- the whole

    async def run(self) -> Tally:
        settings = {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"host": "127.0.0.1", "port": 0},
            "fleet": {"probe_interval_s": 1.0, "info_interval_s": 2.0},
            "tokenizer": {"cache_mb": CACHE_MB},
            "workers": [{"url": url} for url in self._urls],
        }
        (self._folder / "router.yaml").write_text(yaml.safe_dump(settings))
        try:
            await asyncio.gather(*(engine.start() for engine in self._engines))
            port, admin = json.loads(await self._router.start())
            self._base_url, self._admin = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"
            await self._all_live()
            idle = await self._sample()
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
                await self._load(session)
            await self._all_live()
            await self._check_end(idle)
            await self._router.end()
            left = await self._router.line()
            if int(left) != 1:
                self.tally.problems.append(f"{int(left) - 1} tasks outlived the router")
        finally:
            for child in (self._router, *self._engines):
                if hasattr(child, "process"):
                    await child.end(signal.SIGKILL)
        return self.tally

    async def _load(self, session: aiohttp.ClientSession) -> None:
        clients = [asyncio.create_task(self._client(session, random.Random(n))) for n in range(CLIENTS)]
        faults = asyncio.create_task(self._faults(session))
        started = time.monotonic()
        while time.monotonic() - started < self._length_s:
            done, _ = await asyncio.wait([faults, *clients], timeout=SAMPLE_EVERY_S)
            for task in done:
                task.result()  # a fault of this program
            sample = await self._sample()
            sample.at_s = time.monotonic() - started
            self.tally.samples.append(sample)
        self._over.set()
        await asyncio.gather(faults, *clients)

    # ---- load

    async def _client(self, session: aiohttp.ClientSession, rng: random.Random) -> None:
        while not self._over.is_set():
            talk = [{"role": "system", "content": f"rule {rng.randrange(3)} " + " ".join(WORDS * 8)}]
            for _ in range(rng.randrange(1, 7)):
                talk.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=40))})
                answer = await self._ask(session, talk, rng)
                if answer is None or self._over.is_set():
                    break
                talk.append({"role": "assistant", "content": answer})

    async def _ask(self, session: aiohttp.ClientSession, talk: list[dict[str, str]], rng: random.Random) -> str | None:
        """One turn. None: it did not come to an answer. Some clients leave early, some send rubbish."""
        body: dict[str, Any] = {"model": "tiny", "messages": talk, "max_tokens": rng.randrange(1, 16)}
        kind = rng.random()
        if kind < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        data = b"{rubbish" if kind > 0.98 else json.dumps(body).encode()
        url, headers = f"{self._base_url}/v1/chat/completions", {"Content-Type": "application/json"}
        try:
            async with session.post(url, data=data, headers=headers) as answer:
                if answer.status != 200:
                    self.tally.sent[str(answer.status)] += 1
                    await answer.read()
                    return None
                if kind < 0.05:
                    await answer.content.readany()
                    self.tally.sent["client left"] += 1
                    return None
                text, usage = _parse(await answer.read(), kind < 0.5)
        except (aiohttp.ClientError, TimeoutError) as error:
            self.tally.sent[f"cut off ({type(error).__name__})"] += 1
            return None
        self.tally.sent["200"] += 1
        if usage is not None:
            self.tally.prompt_tokens += usage["prompt_tokens"]
            self.tally.cached_tokens += (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        return text

    # ---- faults

    async def _faults(self, session: aiohttp.ClientSession) -> None:
        kinds: dict[str, Callable[[int], Any]] = {
            "kill -9 and restart": self._kill,
            "freeze 3 s": self._freeze,
            "flush": lambda number: self._flush(session, number),
            "remove and add": lambda number: self._replace(session, number),
        }
        while not await self._ends_within(FAULT_EVERY_S):
            kind, number = self._rng.choice(list(kinds)), self._rng.randrange(ENGINES)
            await kinds[kind](number)
            self.tally.faults[kind] += 1

    async def _ends_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._over.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _kill(self, number: int) -> None:
        await self._engines[number].end(signal.SIGKILL)
        await self._engines[number].start()

    async def _freeze(self, number: int) -> None:
        self._engines[number].process.send_signal(signal.SIGSTOP)
        await self._ends_within(3.0)
        self._engines[number].process.send_signal(signal.SIGCONT)

    async def _flush(self, session: aiohttp.ClientSession, number: int) -> None:
        async with session.post(f"{self._urls[number]}/flush_cache") as answer:
            await answer.read()  # 400 while a request runs, which is fine

    async def _replace(self, session: aiohttp.ClientSession, number: int) -> None:
        url = self._urls[number]
        async with session.delete(f"{self._admin}/workers", params={"url": url}) as answer:
            assert answer.status == 200
        async with session.post(f"{self._admin}/workers", json={"url": url}) as answer:
            assert answer.status == 201

    # ---- looking

    async def _sample(self) -> Sample:
        pid = self._router.process.pid
        self._router.process.send_signal(signal.SIGUSR1)
        tasks = int(await self._router.line())
        return Sample(0.0, _rss(pid), len(os.listdir(f"/proc/{pid}/fd")), tasks)

    async def _ranks(self) -> list[dict[str, Any]]:
        # A session of its own: its connection must not be counted among the router's.
        async with aiohttp.ClientSession() as session, session.get(f"{self._admin}/workers") as answer:
            return [rank for worker in (await answer.json())["workers"] for rank in worker["ranks"]]

    async def _all_live(self) -> None:
        await self._until(self._is_live, "every rank live and idle")

    async def _is_live(self) -> bool:
        ranks = await self._ranks()
        idle = all(rank["state"] == "live" and not rank["inflight_requests"] for rank in ranks)
        return idle and len(ranks) == ENGINES

    async def _until(self, seen: Callable[[], Any], what: str) -> bool:
        deadline = time.monotonic() + SETTLE_S
        while not await seen():
            if time.monotonic() > deadline:
                self.tally.problems.append(f"not within {SETTLE_S:.0f} s: {what}; {await self._ranks()}")
                return False
            await asyncio.sleep(0.2)
        return True

    async def _check_end(self, idle: Sample) -> None:
        async def back() -> bool:
            now = await self._sample()
            return now.descriptors <= idle.descriptors and now.tasks <= idle.tasks

        if not await self._until(back, "descriptors and tasks as before the load"):
            now = await self._sample()
            self.tally.problems.append(f"left: {now.descriptors} descriptors, {now.tasks} tasks; before {idle}")
        counted = await self._counter("requests_total", 'route="/v1/chat/completions"')
        sent = self.tally.sent.total()
        if counted != sent:
            self.tally.problems.append(f"{sent} requests were sent, {counted:.0f} counted")
        reported = await self._counter("reported_prompt_tokens_total")
        if reported < self.tally.prompt_tokens:
            self.tally.problems.append(
                f"{self.tally.prompt_tokens} prompt tokens were reported, {reported:.0f} counted"
            )
        if await self._counter("worker_inflight_tokens"):
            self.tally.problems.append("tokens are in flight although nothing is")
        first, last = self.memory()
        if not first or last > first * (1 + self._tolerance):
            self.tally.problems.append(f"memory went from {first / 2**20:.1f} to {last / 2**20:.1f} MiB")

    async def _counter(self, name: str, label: str = "") -> float:
        async with aiohttp.ClientSession() as session, session.get(f"{self._admin}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        wanted = [line for line in lines if line.startswith((f"kv_router_{name} ", f"kv_router_{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in wanted if label in line)

    def memory(self) -> tuple[float, float]:
        """Medians of RSS (bytes): the first fifth of the time that counts, and the last."""
        kept = [s.rss for s in self.tally.samples if s.at_s >= WARM_SHARE * self._length_s]
        fifth = max(1, len(kept) // 5)
        return (statistics.median(kept[:fifth]), statistics.median(kept[-fifth:])) if kept else (0.0, 0.0)

    def report(self) -> str:
        tally, (first, last) = self.tally, self.memory()
        lines = [
            f"requests: {tally.sent.total()} sent; " + ", ".join(f"{k}: {n}" for k, n in tally.sent.most_common()),
            f"hit rate: {tally.cached_tokens / max(1, tally.prompt_tokens):.3f} of {tally.prompt_tokens} prompt tokens",
            "faults: " + (", ".join(f"{k}: {n}" for k, n in tally.faults.most_common()) or "none"),
        ]
        if tally.samples:
            rss = [s.rss / 2**20 for s in tally.samples]
            lines += [
                f"RSS: {first / 2**20:.1f} MiB after warming up, {last / 2**20:.1f} at the end "
                f"({(last / first - 1) * 100:+.1f} %); min {min(rss):.1f}, max {max(rss):.1f}",
                f"descriptors: at most {max(s.descriptors for s in tally.samples)}, "
                f"tasks: at most {max(s.tasks for s in tally.samples)}; both back to idle unless said below",
            ]
        return "\n".join([*lines, *(f"PROBLEM: {problem}" for problem in tally.problems)] or ["nothing ran"])


def _rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def _parse(body: bytes, stream: bool) -> tuple[str, dict[str, Any] | None]:
    if not stream:
        answer = json.loads(body)
        return answer["choices"][0]["message"]["content"], answer["usage"]
    text, usage = "", None
    for line in body.split(b"\n\n"):
        if line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            text += "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
            usage = chunk.get("usage") or usage
    return text, usage


async def soak(minutes: float, tolerance: float) -> Soak:
    with tempfile.TemporaryDirectory(prefix="kv-router-soak-") as folder:
        made = Soak(minutes, tolerance, Path(folder))
        await made.run()
        return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--tolerance", type=float, default=0.05, help="growth of RSS that passes (0.05 is 5 %%)")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve)
        return 0
    made = asyncio.run(soak(args.minutes, args.tolerance))
    print(made.report())
    return 1 if made.tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())

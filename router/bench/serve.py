"""`bench serve`: CPU time of the router's process for a request, under load over real sockets. Linux only.

Router on one core, engines and clients on another where there are two. What counts is CPU time, not requests a second:
the clients are Python too. The numbers hold only if the router made every prompt's token ids and found the shared
prefixes, so the result says so.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
import yaml
from rich.console import Console
from rich.table import Table

from router.bench import serve_bodies as bodies
from router.bench.serve_load import Load, begin, end

ENGINES = 4
START_LIMIT_S = 60.0
STOP_LIMIT_S = 10.0
WARM_UP_S = 0.5


class BenchFailure(Exception):
    """Something did not start, or answered wrongly; the text says what."""


@dataclass(frozen=True, slots=True)
class Scenario:
    title: str
    body: Callable[[int], bytes]
    connections: int = 16
    chunks: int = 1
    """Answers are streams of so many pieces, and the cost is that of a piece."""


SCENARIOS = {
    "small": Scenario("chat of 200 bytes", bodies.small_body),
    "chat_32k": Scenario("chat of 32 KB, 24 KB of it shared", bodies.long_prompt),
    "turns": Scenario("conversations growing to 32 KB", bodies.turn_body),
    "burst": Scenario(f"stream of {bodies.CHUNKS} pieces at once", bodies.burst_body),
    "paced_chunk": Scenario("one piece of a paced stream", bodies.paced_body, 64, bodies.CHUNKS),
}


class _Router:
    """The router under test, by its process id and its addresses."""

    def __init__(self, process: asyncio.subprocess.Process, listen: str, admin: str) -> None:
        self._process = process
        self._admin = admin
        self.host, _, port = listen.rpartition("/")[2].rpartition(":")
        self.port = int(port)

    def cpu_s(self) -> float:
        """Of all its threads so far."""
        tasks = Path(f"/proc/{self._process.pid}/task")
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9

    async def page(self) -> str:
        async with aiohttp.ClientSession() as session, session.get(f"{self._admin}/metrics") as answer:
            return await answer.text()

    async def live(self) -> bool:
        async with aiohttp.ClientSession() as session, session.get(f"{self._admin}/workers") as answer:
            workers = (await answer.json())["workers"]
        ranks = [rank for worker in workers for rank in worker["ranks"]]
        return len(ranks) == ENGINES and all(rank["state"] == "live" and rank["blocks"].get("GPU") for rank in ranks)


def run(seconds: float, *, names: tuple[str, ...] = tuple(SCENARIOS)) -> dict[str, Any]:
    """Returns the `bench serve` object that `--json` writes: CPU µs per request (`paced_chunk`: per piece), each
    scenario measured for `seconds`. Raises BenchFailure."""
    if not sys.platform.startswith("linux"):
        raise BenchFailure("bench serve reads CPU times from /proc, which only Linux has")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(seconds, names))


def print_table(result: dict[str, Any], console: Console) -> None:
    """`run`'s result for people."""
    table = Table(title="CPU time of the router's process")
    table.add_column("request")
    for title in ("CPU", "requests/s", "of the prompt cached"):
        table.add_column(title, justify="right")
    for name, us in result["cpu_us"].items():
        shown = f"{result['cached_share'][name]:.0%}" if name in ("chat_32k", "turns") else ""
        table.add_row(SCENARIOS[name].title, f"{us:,} µs", f"{result['requests_per_s'][name]:,}", shown)
    console.print(table)
    if not result["prompt_tokens_match"]:
        console.print("[red]The router did not make every prompt's token ids: these numbers are for less work.[/red]")


async def _measure(seconds: float, names: tuple[str, ...]) -> dict[str, Any]:
    cpu_us: dict[str, float] = {}
    per_s: dict[str, int] = {}
    cached: dict[str, float] = {}
    errors, match = 0, True
    async with _fleet() as router:
        await _warm_up(router)
        for name in names:
            scenario, load = SCENARIOS[name], Load(SCENARIOS[name].body)
            before = await router.page()
            await begin(load, router.host, router.port, scenario.connections)
            await asyncio.sleep(min(WARM_UP_S, seconds))
            started, spent_s, answered = time.monotonic(), router.cpu_s(), load.answered
            await asyncio.sleep(seconds)
            took_s, spent_s = time.monotonic() - started, router.cpu_s() - spent_s
            answered = load.answered - answered
            await end(load, STOP_LIMIT_S)
            after = await router.page()
            if not answered:
                raise BenchFailure(f"{name}: no request was answered within {seconds:g} s; measure longer")
            cpu_us[name] = round(spent_s / answered / scenario.chunks * 1e6, 1)
            per_s[name] = round(answered / took_s)
            made, held, reported = (_counted(after, metric) - _counted(before, metric) for metric in _TOKENS)
            cached[name] = round(held / made, 3) if made else 0.0
            errors += load.errors
            match = match and made == reported
    return {
        "seconds": seconds,
        "engines": ENGINES,
        "cpu_us": cpu_us,
        "requests_per_s": per_s,
        "cached_share": cached,
        "errors": errors,
        "prompt_tokens_match": match,
    }


_TOKENS = (
    "kv_router_prompt_tokens_total",
    "kv_router_predicted_cached_tokens_total",
    "kv_router_reported_prompt_tokens_total",
)


def _counted(page: str, name: str) -> int:
    found = re.search(rf"^{name} (\S+)$", page, re.MULTILINE)
    return round(float(found[1])) if found is not None else 0


async def _warm_up(router: _Router) -> None:
    """Until the router knows every prefix, has loaded the tokenizer, and answers."""
    deadline = time.monotonic() + START_LIMIT_S
    while True:
        load = Load(bodies.small_body)
        before = await router.page()
        await begin(load, router.host, router.port, 1)
        await end(load, START_LIMIT_S)
        local = 'kv_router_prompts_total{reason="unverified",source="local"}'
        ready = await router.live() and _counted(await router.page(), re.escape(local)) > _counted(
            before, re.escape(local)
        )
        if ready and not load.errors:
            return
        if time.monotonic() > deadline:
            raise BenchFailure(f"the router did not get to know its engines within {START_LIMIT_S:g} s")
        await asyncio.sleep(0.1)


@asynccontextmanager
async def _fleet() -> AsyncIterator[_Router]:
    """Engines and a router, as processes that end with this context."""
    cores = sorted(os.sched_getaffinity(0))
    ours, others = ({cores[0]}, set(cores[1:])) if len(cores) > 1 else (set(cores), set(cores))
    children: list[asyncio.subprocess.Process] = []
    with tempfile.TemporaryDirectory(prefix="kv-router-bench-") as folder:
        os.sched_setaffinity(0, others)
        try:
            engines = await _start(folder, "engines", "-m", "router.bench.serve_engine", str(ENGINES))
            children.append(engines)
            config = {
                "listen": {"host": "127.0.0.1", "port": 0},
                "admin": {"host": "127.0.0.1", "port": 0},
                "timeouts": {"drain_s": 0, "grace_s": 1},
                "workers": [{"url": url} for url in await _first_line(engines, folder, "engines")],
            }
            path = Path(folder) / "router.yaml"
            path.write_text(yaml.safe_dump(config))
            router = await _start(folder, "router", "-m", "router", "serve", "--config", str(path))
            children.append(router)
            os.sched_setaffinity(router.pid, ours)
            where = await _first_line(router, folder, "router")
            yield _Router(router, where["listen"], where["admin"])
        finally:
            os.sched_setaffinity(0, set(cores))
            for child in reversed(children):
                await _stop(child)


async def _start(folder: str, name: str, *arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    with (Path(folder) / f"{name}.log").open("wb") as log:
        return await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe, stderr=log)


async def _first_line(process: asyncio.subprocess.Process, folder: str, name: str) -> Any:
    assert process.stdout is not None
    try:
        return json.loads(await asyncio.wait_for(process.stdout.readline(), START_LIMIT_S))
    except (TimeoutError, ValueError):
        tail = (Path(folder) / f"{name}.log").read_text(errors="replace")[-1500:]
        raise BenchFailure(f"{name} did not start:\n{tail}") from None


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
        except TimeoutError:
            process.kill()
            await process.wait()

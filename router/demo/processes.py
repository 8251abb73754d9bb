"""The demo's processes: N engines and a router over them, started, watched and ended by pid."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import yaml

PAGE_TOKENS = 16
CACHE_TOKENS = 22_000
"""KV capacity of one engine: its own share of the conversations fits, everybody's does not."""
PREFILL_TOKENS_PER_S = 4_000
DECODE_MS = 8
MAX_RUNNING = 16
DECODE_TOKENS = 60_000
DECODE_RUNNING = 48
START_LIMIT_S = 30.0
STOP_LIMIT_S = 5.0


class DemoFailure(Exception):
    """Something did not start or died; the text holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What engines there are. `ranks` is how many caches prompts can be in."""

    engines: tuple[str, ...]
    """Command-line flags of each."""
    ranks: int
    decode: int = 0
    """Engines at the end of the list that only decode."""

    @classmethod
    def plain(cls, engines: int) -> Layout:
        return cls((_PREFILLS,) * engines, engines)

    @classmethod
    def split(cls) -> Layout:
        """Two prefill engines with two data-parallel ranks each, three decode engines."""
        decodes = f"--role decode --tokens {DECODE_TOKENS} --max-running {DECODE_RUNNING}"
        return cls((f"{_PREFILLS} --role prefill --dp-size 2",) * 2 + (decodes,) * 3, 4, 3)


_PREFILLS = f"--tokens {CACHE_TOKENS} --prefill-tokens-per-s {PREFILL_TOKENS_PER_S} --max-running {MAX_RUNNING}"


class Fleet:
    """Cold engines and one router with the given policy, as an async context."""

    def __init__(self, layout: Layout, policy: str) -> None:
        self._layout = layout
        self._policy = policy
        self._urls: list[str] = []
        self._running: list[tuple[asyncio.subprocess.Process, Path]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="kv-router-demo-")
        self.session: aiohttp.ClientSession
        self.base = self.admin = ""

    async def __aenter__(self) -> Fleet:
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=60), trust_env=False
        )
        try:
            self._urls = list(await asyncio.gather(*map(self._engine, range(len(self._layout.engines)))))
            await self._router(self._urls)
            await self._wait(self._all_live, "every event stream live")
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def keeps_answers(self) -> bool:
        """Whether the next turn can find the answer of the last one cached; prefill engines never see an answer."""
        return not self._layout.decode

    async def ranks(self) -> list[dict[str, Any]]:
        """Every rank as `/workers` shows it, with its worker's url."""
        async with self.session.get(f"{self.admin}/workers") as answer:
            workers = (await answer.json())["workers"]
        return [{"url": worker["url"], **rank} for worker in workers for rank in worker["ranks"]]

    async def counter(self, name: str) -> int:
        """A counter of the router's metrics page, summed over its labels."""
        async with self.session.get(f"{self.admin}/metrics") as answer:
            page = await answer.text()
        return round(sum(float(v) for v in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)))

    async def rooms(self) -> dict[str, int]:
        """How hand-overs went on all prefill engines; all zero of a plain fleet."""
        found: dict[str, int] = {"met": 0, "failed": 0, "reused": 0, "refused": 0}
        for url in self._urls:
            async with self.session.get(f"{url}/rooms") as answer:
                counts = await answer.json()
            for name in found:
                found[name] += counts[name]
        return found

    def check(self) -> None:
        """Raises DemoFailure when one of the processes is gone."""
        for process, log in self._running:
            if process.returncode is not None:
                tail = log.read_text(errors="replace")[-1500:]
                raise DemoFailure(f"a process of the demo exited with {process.returncode}:\n{tail}")

    async def _engine(self, number: int) -> str:
        """Starts one engine on free ports; its first line of output names its URL."""
        log = Path(self._folder.name) / f"engine{number}.log"
        command = f"engine --port 0 --page-size {PAGE_TOKENS} --decode-ms {DECODE_MS} {self._layout.engines[number]}"
        process = await self._start(command.split(), log, output=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_LIMIT_S)
        except TimeoutError:
            line = b""
        url = re.search(rb"http://\S+", line)
        if url is None:
            raise DemoFailure(f"engine {number} did not start:\n{log.read_text(errors='replace')[-1500:]}")
        return url[0].decode()

    async def _router(self, urls: list[str]) -> None:
        config = {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"host": "127.0.0.1", "port": 0, "expose_routing_headers": True},
            "timeouts": {"drain_s": 0, "grace_s": 1},
            "policy": {"name": self._policy, "prefill_tokens_per_s": PREFILL_TOKENS_PER_S},
            "workers": [{"url": url} for url in urls],
        }
        path, log = Path(self._folder.name) / "router.yaml", Path(self._folder.name) / "router.log"
        path.write_text(yaml.safe_dump(config))
        process = await self._start(["serve", "--config", str(path)], log, output=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        try:
            line = json.loads(await asyncio.wait_for(process.stdout.readline(), START_LIMIT_S))
            self.base, self.admin = line["listen"], line["admin"]
        except (TimeoutError, ValueError, KeyError, TypeError):
            raise DemoFailure(f"the router did not start:\n{log.read_text(errors='replace')[-1500:]}") from None

    async def _start(self, command: list[str], log: Path, output: int) -> asyncio.subprocess.Process:
        with log.open("wb") as err:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "router", *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=err
            )
        self._running.append((process, log))
        return process

    async def _all_live(self) -> bool:
        ranks = await self.ranks()
        expected = self._layout.ranks + self._layout.decode
        return len(ranks) == expected and all(rank["state"] == "live" for rank in ranks)

    async def _wait(self, seen: Any, what: str) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not await seen():
            self.check()
            if time.monotonic() > deadline:
                raise DemoFailure(f"not within {START_LIMIT_S:g} s: {what}")
            await asyncio.sleep(0.05)

    async def _stop(self) -> None:
        await self.session.close()
        for process, _ in self._running:
            if process.returncode is None:
                process.terminate()
        for process, _ in self._running:
            try:
                await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        self._folder.cleanup()

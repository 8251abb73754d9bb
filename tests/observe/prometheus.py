"""A real Prometheus over one router, with the shipped rules at a shorter scale of time."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.observe.deployed import RULES
from tests.support.engine import free_ports
from tests.support.waiting import until

PROGRAM = shutil.which("prometheus")
WINDOW, HOLD = "12s", "2s"


def hurried(rules: str) -> str:
    """Windows of minutes become 12 s, waits become 2 s, and three requests are enough to judge by."""
    rules = re.sub(r"\[\d+m\]", f"[{WINDOW}]", rules)
    rules = re.sub(r"for: \d+[ms]", f"for: {HOLD}", rules)
    return rules.replace("[12s])) > 20", "[12s])) > 3")


class Prometheus:
    def __init__(self, base: str, session: aiohttp.ClientSession) -> None:
        self._base = base
        self._session = session

    async def query(self, expression: str) -> list[dict[str, Any]]:
        async with self._session.get(f"{self._base}/api/v1/query", params={"query": expression}) as answer:
            said = await answer.json()
        assert said["status"] == "success", f"{expression}: {said.get('error')}"
        found: list[dict[str, Any]] = said["data"]["result"]
        return found

    async def firing(self) -> set[tuple[str, str]]:
        """(alert, worker)"""
        found = await self.query('ALERTS{alertstate="firing"}')
        return {(sample["metric"]["alertname"], sample["metric"].get("worker", "")) for sample in found}

    async def until(self, alert: str, worker: str, fires: bool, timeout_s: float = 60.0) -> float:
        """Seconds until the alert fires for the worker, or no longer does."""
        started = asyncio.get_running_loop().time()
        firing: set[tuple[str, str]] = set()

        async def changed() -> bool:
            nonlocal firing
            firing = await self.firing()
            return ((alert, worker) in firing) == fires

        await until(changed, lambda: f"{alert} {'fires' if fires else 'clears'}: {firing}", timeout_s, 0.25)
        return asyncio.get_running_loop().time() - started


@asynccontextmanager
async def prometheus(folder: Path, target: str) -> AsyncIterator[Prometheus]:
    """`target`: host:port of a router's listener."""
    assert PROGRAM is not None
    (folder / "rules.yaml").write_text(hurried(RULES.read_text()))
    (folder / "prometheus.yaml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [rules.yaml]\n"
        f"scrape_configs: [{{job_name: kv-router, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    port = free_ports(1)
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            f"--config.file={folder}/prometheus.yaml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
            stdout=log,
            stderr=log,
        )
    try:
        async with aiohttp.ClientSession() as session:
            await _ready(session, f"http://127.0.0.1:{port}", folder / "prometheus.log")
            yield Prometheus(f"http://127.0.0.1:{port}", session)
    finally:
        process.terminate()
        await process.wait()


async def _ready(session: aiohttp.ClientSession, base: str, log: Path) -> None:
    async def answers() -> bool:
        try:
            async with session.get(f"{base}/-/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    await until(answers, lambda: f"Prometheus is ready: {log.read_text()[-2000:]}", 30, 0.05)

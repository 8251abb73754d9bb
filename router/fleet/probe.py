"""Watching one worker: two loops, one for /health and one for /server_info, from POST /workers until DELETE."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

import aiohttp

from router.config import FleetConfig
from router.contract.server_info import ServerInfo
from router.fleet.ask import Unanswered, ask_bootstrap, ask_health, ask_info
from router.fleet.worker import Worker

log = logging.getLogger("router.fleet")

FIRST_RETRY_S = 0.2
RETRY_GROWTH = 1.6
SUSPECT_S = 1.0
"""A worker that passed until now and failed once is looked at again this soon."""

BOOTSTRAP_S = 2.0
"""For a connection to a prefill engine's bootstrap port."""


class Backoff:
    """Waits that start at FIRST_RETRY_S and grow to `most_s`, each ±20 % so that a fleet does not ask in step."""

    def __init__(self, most_s: float, rng: random.Random) -> None:
        self._most_s = most_s
        self._rng = rng
        self._next_s = FIRST_RETRY_S

    def reset(self) -> None:
        self._next_s = FIRST_RETRY_S

    def next_s(self) -> float:
        wait_s = min(self._next_s, self._most_s)
        self._next_s = min(self._next_s * RETRY_GROWTH, self._most_s)
        return wait_s * self._rng.uniform(0.8, 1.2)


class Prober:
    """Keeps `worker.health`, `info_problem` and `stale` up to date, and calls back: `on_info` with every good
    /server_info, `on_look` after every look. Neither a garbage answer nor a fault of ours ends a loop."""

    def __init__(
        self,
        worker: Worker,
        session: aiohttp.ClientSession,
        config: FleetConfig,
        *,
        rng: random.Random,
        on_info: Callable[[ServerInfo], None],
        on_look: Callable[[], object],
    ) -> None:
        self._worker = worker
        self._session = session
        self._config = config
        self._rng = rng
        self._on_info = on_info
        self._on_look = on_look
        self._health_retry = Backoff(config.probe_interval_s, rng)
        self._info_retry = Backoff(config.probe_interval_s, rng)
        self._health_wanted = asyncio.Event()
        self._info_wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        name = self._worker.url.text
        self._tasks = [
            asyncio.create_task(self._watch(self._look_at_health, self._health_wanted), name=f"health {name}"),
            asyncio.create_task(self._watch(self._look_at_info, self._info_wanted), name=f"info {name}"),
        ]

    def look_at_health(self) -> None:
        """At once, whatever the schedule."""
        self._health_retry.reset()
        self._health_wanted.set()

    def look_at_info(self) -> None:
        """At once, whatever the schedule."""
        self._info_retry.reset()
        self._info_wanted.set()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, look: Callable[[], Awaitable[float]], wanted: asyncio.Event) -> None:
        """Calls `look`, which says how long to wait for the next time."""
        while True:
            wanted.clear()
            try:
                wait_s = await look()
                self._on_look()
            except Exception:
                log.exception("%s: a look at the worker failed in the router itself", self._worker.url)
                wait_s = self._config.probe_interval_s
            try:
                async with asyncio.timeout(wait_s):
                    await wanted.wait()
            except TimeoutError:
                pass

    async def _look_at_health(self) -> float:
        worker, health = self._worker, self._worker.health
        was_down = health.down
        try:
            await ask_health(self._session, worker, self._config.probe_timeout_s)
        except Unanswered as error:
            health.failed(str(error), refused=error.refused, loading=error.status == 503)
        else:
            health.passed()
            worker.bootstrap_problem = await ask_bootstrap(worker, min(BOOTSTRAP_S, self._config.probe_timeout_s))
        if health.down and not was_down:
            self._health_retry.reset()
        if health.passing:
            if worker.stale:
                self.look_at_info()
            if health.suspect:
                return min(SUSPECT_S, self._config.probe_interval_s) * self._rng.uniform(0.8, 1.2)
            self._health_retry.reset()
            return self._config.probe_interval_s * self._rng.uniform(0.8, 1.2)
        return self._health_retry.next_s()

    async def _look_at_info(self) -> float:
        worker = self._worker
        try:
            info = await ask_info(self._session, worker, self._config.probe_timeout_s)
        except Unanswered as error:
            if worker.info_problem != str(error):
                log.info("%s: %s", worker.url, error)
            worker.info_problem = str(error)
            return self._info_retry.next_s()
        self._on_info(info)
        worker.info_problem = ""
        worker.stale = False
        if not worker.health.passing:
            # Not in use yet: what it says now may be about to change (a restart shows here first).
            return self._info_retry.next_s()
        self._info_retry.reset()
        return info_wait_s(self._config.info_interval_s, self._rng)


def info_wait_s(interval_s: float, rng: random.Random) -> float:
    """Spread, but never over the interval: a restart that shows only in /server_info is to be noticed within 12 s by
    default (interface.md), the answer's own time included."""
    return interval_s * rng.uniform(0.7, 1.0)

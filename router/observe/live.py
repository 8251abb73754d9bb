"""The live page at /ui on the admin listener: one HTML document, and the server-sent events it draws.

`/ui` itself holds no data and needs no key; `/ui/events` and `/ui/worker` do. One task makes one message a second for
all viewers; without viewers it only samples the curves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from router import __version__, build
from router.errors import RouterError
from router.fleet.registry import Fleet
from router.observe.history import FIELDS, STEP_S, History, Point
from router.observe.page import load_page
from router.observe.requests import Placed, Requests
from router.observe.tally import Tally
from router.observe.viewers import Viewers
from router.observe.views import (
    CANDIDATE_FIELDS,
    RANK_FIELDS,
    decision_view,
    ending_view,
    is_over,
    worker_view,
)
from router.policy.decide import REASONS

log = logging.getLogger("router.admin")

TICK_S = 1.0
MAX_NEW_DECISIONS = 6
"""A second: a person reads no more."""
FIRST_DECISIONS = 30
WORKERS_A_SLICE = 32
"""Read between two turns of the event loop."""

Clock = Callable[[], float]


class LivePage:
    """`start` once the loop runs, `close` before the listener goes."""

    def __init__(
        self,
        fleet: Fleet,
        requests: Requests,
        totals: Tally,
        *,
        policy: str,
        clock: Clock,
        wall_clock: Clock = time.time,
    ) -> None:
        self._fleet = fleet
        self._requests = requests
        self._totals = totals
        self._policy = policy
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_s = wall_clock()
        self._history = History()
        self._viewers = Viewers()
        self._shown = 0
        self._unfinished: dict[int, Placed] = {}
        self._task: asyncio.Task[None] | None = None
        self._page = load_page()

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/ui", self._document)
        app.router.add_get("/ui/events", self._events)
        app.router.add_get("/ui/worker", self._worker)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="live page")

    async def close(self) -> None:
        self._viewers.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # ---- what is sent

    async def _run(self) -> None:
        sampled_s = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            try:
                point: Point | None = None
                if self._clock() - sampled_s >= STEP_S:
                    sampled_s = self._clock()
                    point = self._sample()
                if self._viewers:
                    self._viewers.publish("tick", await self._tick(point))
                else:
                    self._shown = self._requests.last_number
                    self._unfinished.clear()
            except Exception:  # the page may fail, the router may not
                log.exception("the live page could not be updated")

    def _sample(self) -> Point:
        requests = self._requests
        return self._history.sample(self._wall_clock(), self._totals, requests.failed, requests.take_ttfts())

    async def _tick(self, point: Point | None) -> dict[str, Any]:
        now_s = self._clock()
        fresh = list(self._requests.recent(self._shown))
        self._shown = self._requests.last_number
        shown = fresh[-MAX_NEW_DECISIONS:]
        ended = {str(number): ending_view(one) for number, one in self._unfinished.items() if is_over(one)}
        for number in ended:
            del self._unfinished[int(number)]
        self._watch(shown)
        return {
            **await self._state(now_s),
            "point": point,
            "decisions": [decision_view(one, now_s) for one in shown],
            "ended": ended,
        }

    async def _state(self, now_s: float) -> dict[str, Any]:
        workers = []
        for at, worker in enumerate(self._fleet.workers, 1):
            workers.append(worker_view(worker, now_s))
            if at % WORKERS_A_SLICE == 0:
                await asyncio.sleep(0)
        return {
            "at": round(self._wall_clock(), 3),
            "running": self._requests.running,
            "finished": self._requests.finished,
            "failed": self._requests.failed,
            "workers": workers,
        }

    async def _hello(self) -> dict[str, Any]:
        now_s = self._clock()
        last = list(self._requests.recent())[-FIRST_DECISIONS:]
        self._watch(last)
        return {
            **await self._state(now_s),
            "version": f"{__version__} ({build.kind()})",
            "policy": self._policy,
            "started_at": round(self._started_s, 3),
            "reasons": REASONS,
            "rank_fields": RANK_FIELDS,
            "candidate_fields": CANDIDATE_FIELDS,
            "point_fields": FIELDS,
            "points": self._history.points(),
            "decisions": [decision_view(one, now_s) for one in last],
        }

    def _watch(self, shown: list[Placed]) -> None:
        """Their ends are sent later. Bounded: what left the ring of recent decisions is looked after no more."""
        self._unfinished.update((one.number, one) for one in shown if not is_over(one))
        oldest = self._requests.last_number - 20 * FIRST_DECISIONS
        for number in [number for number in self._unfinished if number < oldest]:
            del self._unfinished[number]

    # ---- handlers

    async def _document(self, request: web.Request) -> web.Response:
        return web.Response(body=self._page.body, headers=self._page.headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await self._viewers.stream(request, self._hello)

    async def _worker(self, request: web.Request) -> web.Response:
        url = request.query.get("url", "")
        for worker in self._fleet.workers:
            if worker.url.text == url:
                return web.Response(body=msgspec.json.encode(worker.describe()), content_type="application/json")
        raise RouterError("not_found", f"no worker {url[:200]!r}; GET /workers lists them")

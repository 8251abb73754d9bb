"""One data-parallel rank on the event loop: the scheduler's steps become real time, its events leave on the sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from router.engine.publisher import EventPublisher, LoadPublisher
from router.engine.scheduler import Request, Scheduler
from router.engine.wire import PageHasher, encode_batch

LOAD_HEARTBEAT_S = 1.0
_log = logging.getLogger(__name__)


class Rank:
    """Runs `scheduler` with steps lasting their modelled time × `time_scale`. Idle, it only wakes for the heartbeat."""

    def __init__(
        self,
        rank: int,
        scheduler: Scheduler,
        hasher: PageHasher,
        events: EventPublisher | None,
        load: LoadPublisher | None,
        *,
        time_scale: float = 1.0,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self.rank = rank
        self.scheduler = scheduler
        self._scheme = hasher.scheme
        self._events = events
        self._load = load
        self._time_scale = time_scale
        self._clock_s = clock_s
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._publish()
        jobs: list[Coroutine[None, None, None]] = [self._step_forever()]
        if self._load is not None:
            jobs.append(self._beat_forever(self._load))
        if self._events is not None:
            jobs.append(self._events.serve_replay())
        self._tasks = [asyncio.create_task(job) for job in jobs]
        for task in self._tasks:
            task.add_done_callback(_say_why)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises DoesNotFit."""
        self.scheduler.submit(request, self._clock_s())
        self._wake.set()
        self._report_load()

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request, self._clock_s())
        self._report_load()

    def flush(self) -> bool:
        """Empty the cache and announce it at once; False while a request runs or waits."""
        flushed = self.scheduler.flush()
        self._publish()
        return flushed

    @property
    def idle(self) -> bool:
        return not (self.scheduler.running or self.scheduler.waiting)

    async def _step_forever(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            duration_s = self.scheduler.begin_step(self._clock_s())
            if duration_s is None:
                self._wake.clear()
                await self._wake.wait()
                due_s = loop.time()
                continue
            self._report_load()
            due_s += duration_s * self._time_scale
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self.scheduler.end_step(self._clock_s())
            self._publish()

    async def _beat_forever(self, load: LoadPublisher) -> None:
        while True:
            load.report(self.scheduler.load(), force=True)
            await asyncio.sleep(LOAD_HEARTBEAT_S)

    def _publish(self) -> None:
        events = self.scheduler.cache.take_events()
        if events and self._events is not None:
            self._events.send(encode_batch(self._clock_s(), events, self.rank, self._scheme))
        self._report_load()

    def _report_load(self) -> None:
        if self._load is not None:
            self._load.report(self.scheduler.load())


def _say_why(task: asyncio.Task[None]) -> None:
    """A rank's jobs never end by themselves: one that does has found a fault in this program."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a simulated rank stopped", exc_info=error)

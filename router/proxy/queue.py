"""Waiting for room on a worker: bounded in number and time, by priority, then by arrival, one line for each model."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from router.errors import RouterError
from router.proxy.plan import Core, NoRoom, Outcome, Placement

P = TypeVar("P")

_TICK_S = 0.1
"""How often deadlines and workers that came, left or recovered are looked at while somebody waits."""
RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """`max_waiting` requests wait at a time, each for at most `wait_s` seconds."""

    max_waiting: int = 0
    wait_s: float = 30.0


NOBODY_WAITS = QueueOptions()


class Waiting(Generic[P]):
    """A request's place in its line."""

    __slots__ = ("deadline_s", "order", "placed", "plan", "tried")

    def __init__(
        self,
        order: tuple[int, int],
        plan: P,
        tried: frozenset[str],
        deadline_s: float,
        placed: asyncio.Future[Placement],
    ) -> None:
        self.order = order
        self.plan = plan
        self.tried = tried
        self.deadline_s = deadline_s
        self.placed = placed

    def __lt__(self, other: Waiting[P]) -> bool:
        return self.order < other.order


class WaitQueue(Generic[P]):
    """`try_place`, then `wait`, instead of `Core.place`; `released` whenever a placement has ended.

    Nobody who comes later with the same pool and priority is placed before somebody who waits. Requests that have tried
    a worker already stand in lines of their own: what has room for others may be no use to them.
    """

    def __init__(self, core: Core[P], options: QueueOptions) -> None:
        self._core = core
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._lines: dict[tuple[Hashable, frozenset[str]], list[Waiting[P]]] = {}
        self._count = 0
        self._size = 0
        self._tick: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return self._size

    def try_place(self, plan: P, tried: frozenset[str]) -> Placement | None:
        """None when the request has to wait. Raises RouterError (no_worker)."""
        if self._lines and (self._core.pool(plan), tried) in self._lines:
            return None
        try:
            return self._core.place(plan, tried)
        except NoRoom:
            return None

    async def wait(self, plan: P, tried: frozenset[str], priority: int) -> Placement:
        """Raises RouterError: queue_full (429) when no more may wait, queue_timeout (503), no_worker."""
        return await self.stay(self.join(plan, tried, priority))

    def join(self, plan: P, tried: frozenset[str], priority: int) -> Waiting[P]:
        """`wait` from now on: `stay` is to be awaited, or `leave` called. Raises RouterError queue_full (429)."""
        if self._size >= self._options.max_waiting:
            raise NoRoom()
        line = self._core.pool(plan), tried
        self._count += 1
        deadline_s = self._loop.time() + self._options.wait_s
        waiter = Waiting((-priority, self._count), plan, tried, deadline_s, self._loop.create_future())
        heapq.heappush(self._lines.setdefault(line, []), waiter)
        self._size += 1
        if self._tick is None:
            self._tick = self._loop.call_later(_TICK_S, self._look)
        return waiter

    async def stay(self, waiter: Waiting[P]) -> Placement:
        """Raises as `wait`."""
        try:
            return await waiter.placed
        except asyncio.CancelledError:
            self._give_back(waiter)
            raise
        finally:
            self._size -= 1

    def leave(self, waiter: Waiting[P]) -> None:
        """Instead of `stay`."""
        self._size -= 1
        waiter.placed.cancel()
        self._give_back(waiter)

    def _give_back(self, waiter: Waiting[P]) -> None:
        placed = waiter.placed
        if placed.done() and not placed.cancelled() and placed.exception() is None:
            placed.result().finish(Outcome.CLIENT_CLOSED)  # placed in the turn in which the client left
            self.released()

    def released(self) -> None:
        """Room may have become free: those in front take it."""
        if not self._lines:
            return
        for name in list(self._lines):
            line = self._lines[name]
            while line and (line[0].placed.done() or self._served(line[0])):
                heapq.heappop(line)
            if not line:
                del self._lines[name]

    def _served(self, waiter: Waiting[P]) -> bool:
        """False while the waiter has to go on waiting."""
        try:
            waiter.placed.set_result(self._core.place(waiter.plan, waiter.tried))
        except NoRoom:
            return False
        except Exception as error:
            waiter.placed.set_exception(error)
        return True

    def _look(self) -> None:
        now_s = self._loop.time()
        for line in self._lines.values():
            for waiter in line:
                if waiter.deadline_s <= now_s and not waiter.placed.done():
                    text = f"no worker had room within {self._options.wait_s:g} s"
                    waiter.placed.set_exception(RouterError("queue_timeout", text, retry_after_s=RETRY_AFTER_S))
        for line in self._lines.values():  # those who left must not be kept, with their bodies, behind one who waits
            line[:] = [waiter for waiter in line if not waiter.placed.done()]
            heapq.heapify(line)
        self.released()
        self._tick = self._loop.call_later(_TICK_S, self._look) if self._lines else None

"""Shares the event loop between the streams: a burst on one of them, or on all, never holds up a request for long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

log = logging.getLogger(__name__)

SLICE_S = 0.002
"""All streams together work this long in one turn of the event loop, then everything else has its turn (case 31)."""


class Source(Protocol):
    """Something with queued messages."""

    def drain(self, until_s: float) -> bool:
        """Handle what is queued until none is left or `time.monotonic()` passes `until_s`. True: more is left."""


class Pump:
    """Runs the sources that have work, one after the other. An event loop has one, shared by all its streams."""

    def __init__(self) -> None:
        self.before: set[Callable[[], None]] = set()
        """Called ahead of each slice, for what must not wait for its end. None may raise."""
        self._waiting: deque[Source] = deque()
        self._queued: set[Source] = set()
        self._scheduled = False

    def wake(self, source: Source) -> None:
        """`source` may have work. Call it from the loop's thread."""
        if source in self._queued:
            return
        self._queued.add(source)
        self._waiting.append(source)
        if not self._scheduled:
            asyncio.get_running_loop().call_soon(self._run)
            self._scheduled = True

    def forget(self, source: Source) -> None:
        """`source` is closed."""
        if source in self._queued:
            self._queued.remove(source)
            self._waiting.remove(source)

    def _run(self) -> None:
        self._scheduled = False
        for each in self.before:
            each()
        until_s = time.monotonic() + SLICE_S
        while self._waiting:
            source = self._waiting.popleft()
            self._queued.remove(source)
            try:
                more = source.drain(until_s)
            except Exception:
                log.exception("a stream's sink failed; the stream goes on with the next message")
                more = True
            if more:
                self.wake(source)
            if time.monotonic() >= until_s:
                break
        if self._waiting and not self._scheduled:
            asyncio.get_running_loop().call_soon(self._run)
            self._scheduled = True


_pumps: WeakKeyDictionary[asyncio.AbstractEventLoop, Pump] = WeakKeyDictionary()


def running_pump() -> Pump:
    """The running event loop's pump."""
    loop = asyncio.get_running_loop()
    pump = _pumps.get(loop)
    if pump is None:
        pump = _pumps[loop] = Pump()
    return pump

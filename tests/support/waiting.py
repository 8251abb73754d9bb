"""Waiting for what can be observed: the one place where tests let time pass between two looks."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any


async def until(
    seen: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = 8.0, every_s: float = 0.005
) -> Any:
    """Polls until `seen()`, awaited where that is needed, is true, and returns its value. Raises AssertionError with
    `what`, which may be made then, and what was seen last when it is not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := await _look(seen)):
        if time.monotonic() > deadline_s:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {timeout_s:g} s: {said} (last: {value!r})")
        await asyncio.sleep(every_s)
    return value


async def stays(seen: Callable[[], Any], what: str, for_s: float, every_s: float = 0.5) -> None:
    """Looks again and again for so long. Raises AssertionError with `what` the first time `seen()` is not true."""
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        assert await _look(seen), f"no longer: {what}"
        await asyncio.sleep(every_s)


async def _look(seen: Callable[[], Any]) -> Any:
    value = seen()
    return await value if inspect.isawaitable(value) else value

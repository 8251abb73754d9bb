"""Who watches the live page: server-sent events to each, and what a slow one misses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

MAX_VIEWERS = 32
VIEWER_QUEUE = 4
"""Messages a slow viewer may be behind; what comes on top it never sees."""


class Viewers:
    """`stream` answers one viewer's request; `publish` reaches all of them."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes | None]] = set()

    def __bool__(self) -> bool:
        return bool(self._queues)

    def publish(self, event: str, message: dict[str, Any]) -> None:
        data = _event(event, message)
        for queue in self._queues:
            if not queue.full():
                queue.put_nowait(data)

    async def stream(self, request: web.Request, hello: Callable[[], Awaitable[dict[str, Any]]]) -> web.StreamResponse:
        """`hello()` first, then everything published, until the page is closed or `close`."""
        if len(self._queues) >= MAX_VIEWERS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_VIEWERS} pages are open already; close one")
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(VIEWER_QUEUE)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        )
        await response.prepare(request)
        self._queues.add(queue)
        try:
            await response.write(_event("hello", await hello()))
            while (data := await queue.get()) is not None:
                await response.write(data)
        except ConnectionError:
            pass  # the page was closed
        finally:
            self._queues.discard(queue)
        return response

    def close(self) -> None:
        """Ends every stream."""
        for queue in self._queues:
            while queue.full():
                queue.get_nowait()
            queue.put_nowait(None)


def _event(name: str, message: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(message, enc_hook=str))

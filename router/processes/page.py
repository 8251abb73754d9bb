"""/ui of several processes: follows each one's live page while somebody watches, and shows them as one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from router.observe.page import load_page
from router.observe.viewers import Viewers
from router.processes.live import LiveMerge
from router.processes.process import ServingProcess

log = logging.getLogger("router.admin")

TICK_S = 1.0
FIRST_LIMIT_S = 2.0
"""How long a new viewer waits for every process to be heard."""
RETRY_S = 0.5
IDLE_S = 10.0
"""Without viewers the processes are followed for so long."""
MAX_EVENT_BYTES = 64 << 20


class CommonPage:
    """`close` before the listener goes."""

    def __init__(self, processes: Sequence[ServingProcess]) -> None:
        self._processes = processes
        self._viewers = Viewers()
        self._merge = LiveMerge()
        self._document_page = load_page()
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/ui", self._document)
        app.router.add_get("/ui/events", self._events)

    async def close(self) -> None:
        self._viewers.close()
        await self._stop()

    async def _document(self, request: web.Request) -> web.Response:
        return web.Response(body=self._document_page.body, headers=self._document_page.headers)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if not self._tasks:
            self._merge = LiveMerge()
            self._tasks = [asyncio.create_task(self._follow(process)) for process in self._processes]
            self._tasks.append(asyncio.create_task(self._run(), name="live page"))
        return await self._viewers.stream(request, self._hello)

    async def _hello(self) -> dict[str, Any]:
        wanted = {process.number for process in self._processes if process.state == "serving"}
        try:
            async with asyncio.timeout(FIRST_LIMIT_S):
                while not wanted <= self._merge.heard:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass  # it shows what there is
        return self._merge.hello()

    async def _run(self) -> None:
        idle_s = 0.0
        while idle_s < IDLE_S:
            await asyncio.sleep(TICK_S)
            idle_s = 0.0 if self._viewers else idle_s + TICK_S
            if self._merge.heard:
                self._viewers.publish("tick", self._merge.tick())
        followers, self._tasks = self._tasks[:-1], []
        for task in followers:
            task.cancel()
        await asyncio.gather(*followers, return_exceptions=True)

    async def _stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, process: ServingProcess) -> None:
        while True:
            try:
                await self._read(process)
            except (aiohttp.ClientError, OSError, ValueError, msgspec.MsgspecError) as error:
                log.debug("the live page of process %d: %r", process.number, error)
            self._merge.lost(process.number)
            await asyncio.sleep(RETRY_S)

    async def _read(self, process: ServingProcess) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_read=10 * TICK_S)
        async with process.session().get("http://process/ui/events", timeout=timeout) as answer:
            answer.raise_for_status()
            held = b""
            async for data in answer.content.iter_any():
                *events, held = (held + data).split(b"\n\n")
                if len(held) > MAX_EVENT_BYTES:
                    raise ValueError("an event without an end")
                for event in events:
                    name, _, text = event.partition(b"\n")
                    message = msgspec.json.decode(text.removeprefix(b"data: "))
                    self._merge.take(process.number, name.removeprefix(b"event: ").decode(), message)
                    self._changed.set()

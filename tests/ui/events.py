"""Reads the page's server-sent events as the page does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from tests.e2e.conftest import Running


class Events:
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self._answer = answer

    async def next(self) -> tuple[str, dict[str, Any]]:
        name = (await self._answer.content.readline()).decode().removeprefix("event: ").strip()
        data: dict[str, Any] = msgspec.json.decode((await self._answer.content.readline()).removeprefix(b"data: "))
        assert await self._answer.content.readline() == b"\n"
        return name, data

    async def ended(self) -> bool:
        return await self._answer.content.readline() == b""


@asynccontextmanager
async def events(router: Running, **headers: str) -> AsyncIterator[Events]:
    # A fleet of hundreds is one long line.
    async with (
        aiohttp.ClientSession(read_bufsize=1 << 22, timeout=aiohttp.ClientTimeout(total=20)) as session,
        session.get(f"{router.admin}/ui/events", headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"
        yield Events(answer)

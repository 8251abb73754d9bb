"""The two halves of a request on simulated engines: a prefill engine's answer, and what a decode engine waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any

from aiohttp import web

from router.engine.answer import Answer
from router.engine.handover import BootstrapServer, HandoverFailed, Meeting, take_over
from router.engine.rank import Rank
from router.engine.rooms import Handed, Joined, Room
from router.hashing import Namespace, TokenIds

Prompts = Sequence[tuple[TokenIds, Namespace]]


async def all_of(jobs: Sequence[Awaitable[Handed | Joined | None]]) -> list[Handed | Joined | None]:
    """Their results; the first failure ends the others."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def prefill_answer(
    server: BootstrapServer,
    meetings: Sequence[Meeting],
    ranks: Sequence[Rank],
    prompts: Prompts,
    make: Callable[[], Answer],
) -> web.StreamResponse:
    """As SGLang's prefill server: nothing is computed before the decode side is there, and the answer, one token long,
    comes when its KV has been moved. Raises HandoverFailed, BadRequest."""
    with ExitStack() as stack:
        rooms: list[Room] = []
        for meeting, rank in zip(meetings, ranks, strict=True):
            room = server.open(meeting, rank.rank)
            stack.callback(server.rooms.leave, room, "prefill")
            rooms.append(room)
        joined = await all_of(
            [server.joined(room, ids, rank.rank) for room, (ids, _), rank in zip(rooms, prompts, ranks, strict=True)]
        )
        answer = make()
        try:
            answer.submit()
            whole = await _unless_left(answer, rooms)
            requests = answer.requests
            await all_of(
                [
                    server.deliver(room, said, request.prompt_tokens, request.cached_tokens)
                    for room, said, request in zip(rooms, joined, requests, strict=True)
                    if isinstance(said, Joined)
                ]
            )
            return whole
        finally:
            answer.close()


async def _unless_left(answer: Answer, rooms: Sequence[Room]) -> web.Response:
    """Computes the prompts, unless a decode side leaves meanwhile. Raises HandoverFailed."""
    computing = asyncio.ensure_future(answer.whole())
    try:
        waits: list[asyncio.Future[Any]] = [computing, *(room.handed for room in rooms)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for room in rooms:
            if room.handed.done():
                raise HandoverFailed(f"room {room.number}: {room.handed.exception()}")
        return await computing
    finally:
        computing.cancel()


async def taken_over(
    meetings: Sequence[Meeting], ranks: Sequence[Rank], prompts: Prompts, timeout_s: float
) -> list[Handed]:
    """What the prefill engine computed of each sequence. Raises HandoverFailed."""
    found = await all_of(
        [
            take_over(meeting, ids, rank.scheduler.held_tokens(ids, namespace), timeout_s)
            for meeting, rank, (ids, namespace) in zip(meetings, ranks, prompts, strict=True)
        ]
    )
    return [handed for handed in found if isinstance(handed, Handed)]

"""Fixtures: a context that must be free of sockets when the test is over, publishers, and running streams."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
import zmq

from router.contract.descriptor import RankEndpoints
from router.stream.replay import StreamLimits
from router.stream.sockets import new_context
from router.stream.subscriber import RankStream
from tests.stream.publisher import Publisher, Recorder

Context = zmq.Context[zmq.Socket[bytes]]
Follow = Callable[..., AbstractAsyncContextManager[Recorder]]

QUICK = StreamLimits(replay_quiet_s=0.3, replay_cooldown_s=0.3, unreachable_after_s=0.3)


@pytest.fixture
def context() -> Iterator[Context]:
    """Terminating it hangs while any of its sockets is open, so a leak fails the test."""
    context = new_context()
    yield context
    closing = threading.Thread(target=context.term, daemon=True)
    closing.start()
    closing.join(5)
    assert not closing.is_alive(), "a socket was left open"


@pytest.fixture
def publisher(context: Context) -> Iterator[Callable[..., Publisher]]:
    made: list[Publisher] = []

    def make(**settings: Any) -> Publisher:
        made.append(Publisher(context, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def follow(context: Context) -> Follow:
    """`async with follow(endpoints, topic) as sink`: a running RankStream; afterwards no task of it may be left."""

    @asynccontextmanager
    async def running(
        endpoints: RankEndpoints, topic: str = "", limits: StreamLimits = QUICK
    ) -> AsyncIterator[Recorder]:
        tasks = asyncio.all_tasks()
        sink = Recorder()
        stream = RankStream(context, endpoints, topic, sink, limits=limits)
        stream.start()
        try:
            yield sink
        finally:
            await stream.close()
        assert asyncio.all_tasks() == tasks

    return running

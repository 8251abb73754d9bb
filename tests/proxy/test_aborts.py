from __future__ import annotations

import asyncio
import os
import random

import pytest

from router.proxy.plan import Outcome
from router.proxy.upstream import UpstreamLimits
from tests.proxy.fakes import bench, every_way  # noqa: F401
from tests.support.http import RawClient, Reply, Seen, post
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("every_way")

ABORTS = int(os.environ.get("KV_ROUTER_ABORTS", "1000"))
TOGETHER = 50


async def test_after_many_random_aborts_nothing_is_left() -> None:
    """Cases 55, 63, 64 and 99: clients and workers that break off anywhere; one end for every placement and request."""
    chance = random.Random(7)

    async def script(seen: Seen, reply: Reply) -> None:
        what = chance.randrange(8)
        if what == 0:
            reply.reset()
        elif what == 1:
            await reply.gone()
        elif what == 2:
            await reply.whole(chance.choice((400, 404, 422, 429, 500, 503)))
        elif what == 3:
            await reply.whole()
        else:
            await reply.begin_stream()
            for _ in range(chance.randrange(4)):
                await reply.chunk(b"data: x\n\n")
                await asyncio.sleep(chance.random() * 0.004)
            if what == 4:
                reply.reset()
            elif what == 5:
                await reply.gone()
            else:
                await reply.chunk(b"data: [DONE]\n\n")
                await reply.end_stream()

    async def client(port: int) -> None:
        connection = await RawClient.to(port)
        try:
            await connection.send(post(body=b"x" * chance.choice((2, 2, 300_000)))[: chance.choice((None, None, 200))])
            patience_s = chance.choice((0, chance.random() * 0.02, 0.1))
            if patience_s:
                await asyncio.wait_for(connection.answer(), patience_s)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass
        connection.leave()

    async with bench(workers=3, limits=UpstreamLimits(idle_s=30)) as b:
        for worker in b.workers:
            worker.script = script
        for _ in range(ABORTS // TOGETHER):
            await asyncio.gather(*(client(b.port) for _ in range(TOGETHER)))
        await until(lambda: b.listener.in_flight == 0, "every request ended")
        assert b.core.unfinished == []
        assert len(b.core.placements) == sum(record.attempts for record in b.core.records)
        await until(
            lambda: b.upstream.open_connections == b.upstream.idle_connections, "only idle connections are left"
        )
        await until(lambda: not b.listener.connections, "no client connection is left")
        assert set(b.core.outcomes) == set(Outcome)

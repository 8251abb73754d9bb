"""Clients that send faster than they are answered, or take their answers more slowly than they come."""

from __future__ import annotations

import asyncio
from typing import cast

from router.proxy.downstream import ClientConnection
from router.proxy.outbox import Turn
from router.proxy.request import BodyBudget, Request, RequestParser
from router.proxy.server import ListenerOptions
from tests.proxy.fakes import bench
from tests.support.http import RawClient, Reply, Seen, fetch, get, post
from tests.support.waiting import until


async def test_the_body_of_the_last_of_many_pipelined_requests_is_read() -> None:
    """More wait than are read ahead, and the rest of the last one's body is still in the socket."""
    go = asyncio.Event()

    async def script(seen: Seen, reply: Reply) -> None:
        await go.wait()
        await reply.whole(200, b"{}")

    async with bench(options=ListenerOptions(port=0, body_s=5.0)) as b:
        b.worker.script = script
        client = await RawClient.to(b.port)
        await client.send(post())
        await until(lambda: bool(b.worker.requests), "the first one is under way")
        last = post(body=b"x" * 1000)
        await client.send(b"".join(get(f"/nope?{number}") for number in range(40)) + last[:-500])
        (connection,) = b.listener._connections
        await until(lambda: connection._held_back, "no more is read")
        go.set()
        assert (await client.answer()).status == 200
        for _ in range(40):
            assert (await client.answer()).status == 404
        await client.send(last[-500:])
        assert (await client.answer()).status == 200
        client.leave()


async def test_a_client_that_reads_nothing_is_not_answered_ahead() -> None:
    """Case 77: what is pipelined behind an answer that the client does not take has to wait."""
    async with bench() as b:
        page = b"x" * 1_000_000

        async def metrics() -> bytes:
            return page

        b.core.metrics = metrics  # type: ignore[method-assign]
        client = await RawClient.to(b.port, limit=1 << 16)
        count = 60
        await client.send(get("/metrics") * count)
        (connection,) = b.listener._connections
        await until(lambda: connection.full, "the client is full")
        for _ in range(5):  # as many turns as the listener likes
            await fetch(b.port, get("/health"))
        pages = [record for record in b.core.records if record.route == "/metrics"]
        assert len(pages) < count, "all were written at once"
        assert connection.unsent_bytes < 2 * len(page)
        for _ in range(count):
            assert len((await client.answer()).body) == len(page)
        client.leave()


class Unsent:
    """A transport with bytes that the client does not take."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.cut = False

    def get_extra_info(self, name: str) -> None: ...
    def get_write_buffer_size(self) -> int:
        return self.count

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.cut

    def close(self) -> None: ...
    def write_eof(self) -> None: ...
    def abort(self) -> None:
        self.cut = True


async def test_the_end_of_an_answer_waits_for_a_client_that_reads_slowly() -> None:
    """Case 77: what is left is too little to count as a full connection; the client has its time all the same."""
    loop = asyncio.get_running_loop()

    def serve(connection: ClientConnection, request: Request) -> None:
        raise AssertionError("nothing was asked")

    for unsent, cut in ((1000, False), (0, True)):
        transport = Unsent(unsent)
        parser = RequestParser(1000, BodyBudget(1000))
        connection = ClientConnection(Turn(loop), parser, serve, lambda made: True, lambda lost: None)
        connection.connection_made(cast(asyncio.Transport, transport))
        connection.end()
        now = loop.time()
        connection.sweep(now + 10, 30, 60, 120)
        assert transport.cut == cut
        connection.sweep(now + 61, 30, 60, 120)
        assert transport.cut, "one that takes nothing is cut in the end"


async def test_closing_lets_a_slow_client_take_the_rest_of_its_answer() -> None:
    """Case 77: its request is no longer in flight, and much of its answer is."""
    async with bench() as b:
        page = b"x" * 40_000_000

        async def metrics() -> bytes:
            return page

        b.core.metrics = metrics  # type: ignore[method-assign]
        client = await RawClient.to(b.port, limit=1 << 16)
        await client.send(get("/metrics"))
        await until(lambda: len(b.core.records) == 1, "answered, as far as the listener can tell")
        closing = asyncio.create_task(b.listener.close(20.0))
        assert len((await client.answer()).body) == len(page)
        client.leave()
        await closing

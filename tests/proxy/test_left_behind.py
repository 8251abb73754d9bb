"""What is left when something goes wrong in the middle: a client that leaves in the turn in which it asked, a fault of
the router's own code. Nothing may be: no load, no exchange, no body, no connection."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from router.proxy.attempt import Incoming
from router.proxy.connection import Connection, Owner
from router.proxy.plan import Outcome
from router.proxy.queue import QueueOptions
from router.proxy.server import ClientExchange, ListenerOptions
from router.proxy.upstream import UpstreamLimits
from tests.proxy.fakes import FakeCore, FakePlacement, bench
from tests.support.built import interpreted
from tests.support.http import RawClient, Reply, Seen, fetch, post
from tests.support.waiting import until

_FINISH = FakePlacement.finish


def finishes_and_fails(self: FakePlacement, outcome: Outcome, **named: Any) -> None:
    _FINISH(self, outcome, **named)
    raise ZeroDivisionError


async def silent(seen: Seen, reply: Reply) -> None:
    await reply.gone()


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_client_that_leaves_in_the_turn_in_which_it_asked_leaves_nothing(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for its turn is never begun."""
    monkeypatch.setattr(FakeCore, "at_once", at_once)
    async with bench() as b:
        connection = b.listener._accept()
        connection.connection_made(Silent())
        connection.data_received(post())
        assert b.listener.in_flight == 1
        connection.connection_lost(None)
        assert (b.listener.in_flight, b.listener.connections, b.listener.buffered_bytes) == (0, 0, 0)
        assert b.core.outcomes == [Outcome.CLIENT_CLOSED]
        await fetch(b.port, post(body=b"later"))
        assert [seen.body for seen in b.worker.requests] == [b"later"]
        assert b.core.outcomes == [Outcome.CLIENT_CLOSED, Outcome.OK]


class Silent(asyncio.Transport):
    """A client that takes everything."""

    def write(self, data: bytes | bytearray | memoryview) -> None: ...
    def is_closing(self) -> bool:
        return False


@pytest.mark.parametrize("how", ["answered", "awaited", "overloaded", "broken", "left"])
async def test_what_a_request_leaves_behind_is_freed_at_its_end(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its last reference: with serve.py's thresholds, bodies in cycles would wait long for a garbage collection."""
    monkeypatch.setattr(FakeCore, "at_once", how != "awaited")

    async def serve(seen: Seen, reply: Reply) -> None:
        if how == "broken":
            await reply.raw(b"no HTTP")
        elif how == "left":
            await reply.gone()
        else:
            await reply.whole(429 if how == "overloaded" else 200)

    async with bench() as b:
        client = await RawClient.to(b.port)
        await client.send(post())
        await client.answer()
        b.worker.script = serve
        gc.collect()
        gc.disable()
        try:
            await client.send(post())
            if how == "left":
                await until(lambda: len(b.worker.requests) == 2, "it has come to the worker")
                client.leave()
            else:
                await client.answer()
            await until(lambda: len(b.core.records) == 2, "it is over")
            for _ in range(3):
                await asyncio.sleep(0)
            left = [found for found in gc.get_objects() if isinstance(found, ClientExchange | Incoming)]
        finally:
            gc.enable()
        assert left == []
        client.leave()


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("what", ["first_byte", "finish"])
async def test_a_fault_of_ours_while_an_answer_passes_ends_the_request(
    what: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody but the worker's bytes moves such a request on; its client must not wait for ever."""

    whole = getattr(FakePlacement, what)

    def broken(*args: object, **named: object) -> None:
        whole(*args, **named)
        raise ZeroDivisionError

    has_head = asyncio.Event()

    async def serve(seen: Seen, reply: Reply) -> None:
        if pieces == 1:
            await reply.whole(200)
        else:
            await reply.raw(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n")
            await has_head.wait()
            await reply.raw(b"{}")

    async with bench() as b:
        await fetch(b.port, post())
        b.worker.script = serve
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        monkeypatch.setattr(FakePlacement, what, broken)
        client = await RawClient.to(b.port)
        await client.send(post())
        if pieces == 2:
            await client.head()
            has_head.set()
        await until(lambda: len(b.core.records) == 2, "it is over")
        assert b.core.outcomes[1] is Outcome.STREAM_ERROR
        assert (b.listener.in_flight, b.listener.buffered_bytes) == (0, 0)
        client.leave()


async def test_a_fault_of_ours_when_a_client_leaves_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        await fetch(b.port, post())
        b.worker.script = silent
        client = await RawClient.to(b.port)
        await client.send(post())
        await until(lambda: len(b.worker.requests) == 2, "it has come to the worker")
        monkeypatch.setattr(FakePlacement, "finish", finishes_and_fails)
        client.leave()
        await until(lambda: len(b.core.records) == 2, "it is over")
        await until(lambda: b.worker.open == 0, "the worker was told")
        assert (b.listener.in_flight, b.listener.connections) == (0, 0)


async def test_who_comes_later_in_the_same_turn_is_not_placed_before_who_waits() -> None:
    async with bench(options=ListenerOptions(port=0, queue=QueueOptions(10, 20.0))) as b:
        b.core.limit = 1
        b.core.pool = lambda plan: "one line"  # type: ignore[method-assign]
        held = b.core.place(b"held", frozenset())
        connections = []
        for name in ("first", "leaver", "second"):
            connections.append(b.listener._accept())
            connections[-1].connection_made(Silent())
            connections[-1].data_received(post(body=name.encode()))
            if name == "leaver":
                connections[-1].connection_lost(None)
                assert b.listener.waiting == 1
                held.finish(Outcome.OK)
        await until(lambda: len(b.core.records) == 3, "both have their answers")
        assert [placement.body for placement in b.core.placements] == [b"held", b"first", b"second"]
        assert b.listener.waiting == 0
        assert None not in [record.queued_s for record in b.core.records]
        for connection in connections[::2]:
            connection.connection_lost(None)


async def test_who_is_placed_and_leaves_in_the_turn_in_which_he_asked_gives_the_room_back() -> None:
    async with bench(options=ListenerOptions(port=0, queue=QueueOptions(10, 20.0))) as b:
        b.core.limit = 1
        assert b.listener._forwarder is not None
        held = b.core.place(b"held", frozenset())
        connection = b.listener._accept()
        connection.connection_made(Silent())
        connection.data_received(post())
        held.finish(Outcome.OK)
        b.listener._forwarder._queue.released()
        connection.connection_lost(None)
        assert b.core.outcomes == [Outcome.CLIENT_CLOSED]
        assert (b.listener.waiting, b.listener.in_flight) == (0, 0)
        await fetch(b.port, post(body=b"later"))
        assert [seen.body for seen in b.worker.requests] == [b"later"]


async def test_a_fault_of_ours_when_a_worker_is_silent_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench(limits=UpstreamLimits(idle_s=0.2)) as b:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        await fetch(b.port, post())
        b.worker.script = silent
        with monkeypatch.context() as patched:
            patched.setattr(FakePlacement, "finish", finishes_and_fails)
            assert (await fetch(b.port, post())).status == 500
        answer = await fetch(b.port, post())
        assert (answer.status, answer.one("x-kv-router-error")) == (504, "upstream_timeout")


@interpreted
async def test_a_fault_of_ours_while_a_request_is_sent_costs_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        await fetch(b.port, post())
        whole = Connection.ask

        def broken(self: Connection, head: bytes, body: bytes, owner: Owner) -> None:
            whole(self, head, body, owner)
            raise ZeroDivisionError

        monkeypatch.setattr(Connection, "ask", broken)
        assert (await fetch(b.port, post())).status == 500
        await until(lambda: b.upstream.open_connections == 0, "nobody else gets it")
        assert (b.core.records[1].worker, b.core.records[1].attempts) == (b.core.urls[0].text, 1)
        assert b.core.outcomes[1:] == [Outcome.UPSTREAM_ERROR]

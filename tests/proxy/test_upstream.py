from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from router.proxy.connection import UpstreamConnectError, UpstreamReset, UpstreamTimeout
from router.proxy.upstream import UpstreamClient, UpstreamLimits, UpstreamResponse
from tests.proxy.fakes import Url
from tests.support.built import interpreted
from tests.support.http import HOST, Reply, ScriptedWorker, Seen, ok
from tests.support.waiting import until


class Body:
    def __init__(self) -> None:
        self.data = bytearray()
        self.ended = False

    def write(self, data: bytes) -> None:
        self.data += data

    def end(self, data: bytes) -> None:
        self.data += data
        self.ended = True


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    worker = await ScriptedWorker().start()
    yield worker
    await worker.close()


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    client = UpstreamClient(UpstreamLimits(connect_s=2, idle_s=10))
    yield client
    await client.close()
    assert client.open_connections == 0


async def send(client: UpstreamClient, worker: ScriptedWorker, body: bytes = b"{}") -> UpstreamResponse:
    return await client.send(Url(HOST, worker.port), b"POST", b"/x?y=%7e", [(b"A", b"1")], body)


async def finish(response: UpstreamResponse) -> bytes:
    body = Body()
    await response.pipe(body)
    response.close()
    return bytes(body.data)


async def test_the_request_goes_out_as_given(client: UpstreamClient, worker: ScriptedWorker) -> None:
    """Cases 71 and 81: raw target, Host of the worker, one length."""
    response = await send(client, worker, b"abc")
    assert (response.status, response.reason, await finish(response)) == (200, b"Scripted", b"{}")
    seen = worker.requests[0]
    assert (seen.method, seen.target, seen.body) == ("POST", "/x?y=%7e", b"abc")
    assert seen.fields == [("Host", f"{HOST}:{worker.port}"), ("A", "1"), ("Content-Length", "3")]


async def test_a_connection_is_used_again_and_again(client: UpstreamClient, worker: ScriptedWorker) -> None:
    reused = []
    for _ in range(3):
        response = await send(client, worker)
        reused.append(response.reused)
        await finish(response)
    assert (worker.connections, reused) == (1, [False, True, True])


async def test_nagle_is_off(client: UpstreamClient, worker: ScriptedWorker) -> None:
    response = await send(client, worker)
    connection = response._connection
    assert connection is not None
    assert connection._transport is not None
    raw = connection._transport.get_extra_info("socket")
    assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await finish(response)


async def test_idle_connections_go_before_the_worker_would_close_them(worker: ScriptedWorker) -> None:
    """Case 74."""
    client = UpstreamClient(UpstreamLimits(pool_idle_s=0.05))
    await finish(await send(client, worker))
    assert client.idle_connections == 1
    await until(lambda: client.open_connections == 0 and worker.open == 0, "the idle connection was closed")
    await until(lambda: not client._idle, "nothing of the worker is kept (case 98)")
    await client.close()
    assert UpstreamLimits().pool_idle_s < 5


async def test_a_reused_connection_that_fails_unanswered_is_replaced_once(
    client: UpstreamClient, worker: ScriptedWorker
) -> None:
    """Case 74: the worker closed it as our request was on its way."""
    await finish(await send(client, worker))

    async def close_once(seen: Seen, reply: Reply) -> None:
        worker.script = ok
        reply.close()

    worker.script = close_once
    assert await finish(await send(client, worker)) == b"{}"
    assert worker.connections == 2


async def test_a_fresh_connection_that_fails_unanswered_is_not_replaced(
    client: UpstreamClient, worker: ScriptedWorker
) -> None:
    """Case 69."""

    async def close(seen: Seen, reply: Reply) -> None:
        reply.close()

    worker.script = close
    with pytest.raises(UpstreamReset):
        await send(client, worker)
    assert len(worker.requests) == 1


async def test_a_reused_connection_that_fails_after_a_byte_is_not_replaced(
    client: UpstreamClient, worker: ScriptedWorker
) -> None:
    """Case 69."""
    await finish(await send(client, worker))

    async def half_a_head(seen: Seen, reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 200 O")
        reply.close()

    worker.script = half_a_head
    with pytest.raises(UpstreamReset):
        await send(client, worker)
    assert len(worker.requests) == 2


async def test_a_worker_that_dies_under_a_reused_connection_is_a_reset(
    client: UpstreamClient, worker: ScriptedWorker
) -> None:
    """Not a connect failure: the request may have killed it, and must not be offered to the next worker."""
    await finish(await send(client, worker))

    async def die(seen: Seen, reply: Reply) -> None:
        await worker.stop_listening()
        reply.reset()

    worker.script = die
    with pytest.raises(UpstreamReset):
        await send(client, worker)


async def test_nobody_listening_is_a_connect_failure(client: UpstreamClient, worker: ScriptedWorker) -> None:
    url = Url(HOST, worker.port)
    await worker.stop_listening()
    with pytest.raises(UpstreamConnectError):
        await client.send(url, b"POST", b"/", [], b"")


async def test_connecting_has_a_time_limit() -> None:
    client = UpstreamClient(UpstreamLimits(connect_s=0.1))
    listening = socket.create_server((HOST, 0), backlog=0)
    fillers = []
    for _ in range(4):  # fill the accept queue, so that a further connect hangs
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(listening.getsockname())
        fillers.append(filler)
    with pytest.raises(UpstreamConnectError):
        await client.send(Url(HOST, listening.getsockname()[1]), b"POST", b"/", [], b"")
    for each in (*fillers, listening):
        each.close()
    await client.close()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_silent_worker_times_out(worker: ScriptedWorker, begun: bool) -> None:
    client = UpstreamClient(UpstreamLimits(idle_s=0.1))

    async def silent(seen: Seen, reply: Reply) -> None:
        if begun:
            await reply.begin_stream()
        await reply.gone()

    worker.script = silent
    with pytest.raises(UpstreamTimeout):
        await finish(await send(client, worker))
    await until(lambda: worker.open == 0, "the worker was told")
    await client.close()


async def test_steady_bytes_keep_an_exchange_alive_past_the_idle_limit(worker: ScriptedWorker) -> None:
    """Case 73: no total limit."""
    client = UpstreamClient(UpstreamLimits(idle_s=0.2))

    async def drip(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        for _ in range(12):
            await reply.chunk(b"x")
            await asyncio.sleep(0.05)
        await reply.end_stream()

    worker.script = drip
    assert await finish(await send(client, worker)) == b"x" * 12
    await client.close()


async def test_a_large_body_waits_for_the_worker(client: UpstreamClient, worker: ScriptedWorker) -> None:
    """Case 78: a slow worker does not make us buffer the body a second time."""
    worker.read_body = False
    taken = asyncio.Event()
    received = bytearray()
    body = bytes(range(256)) * (64 << 10)

    async def slow(seen: Seen, reply: Reply) -> None:
        await taken.wait()
        while len(received) < len(body):
            received.extend(await reply.reader.read(1 << 20))
        await reply.whole()

    worker.script = slow
    task = asyncio.create_task(send(client, worker, body))
    await until(lambda: len(worker.requests) == 1, "the head arrived")
    connection = next(iter(client._all))
    assert connection._transport is not None
    assert connection._transport.get_write_buffer_size() < 1 << 20
    taken.set()
    assert await finish(await task) == b"{}"
    assert bytes(received) == body


async def test_an_answer_before_the_whole_body_was_sent_is_taken(
    client: UpstreamClient, worker: ScriptedWorker
) -> None:
    worker.read_body = False

    async def refuse(seen: Seen, reply: Reply) -> None:
        await reply.whole(413, b"too large")
        await reply.gone()

    worker.script = refuse
    response = await send(client, worker, b"x" * (32 << 20))
    assert (response.status, await finish(response)) == (413, b"too large")
    assert client.idle_connections == 0


async def test_an_unread_answer_is_held_back_at_the_worker(client: UpstreamClient, worker: ScriptedWorker) -> None:
    sent = 0

    async def flood(seen: Seen, reply: Reply) -> None:
        nonlocal sent
        await reply.begin_stream()
        for _ in range(24):
            await reply.chunk(b"x" * (1 << 20))
            sent += 1
        await reply.end_stream()

    worker.script = flood
    response = await send(client, worker)
    connection = response._connection
    assert connection is not None
    await until(lambda: connection._read_paused, "reading is paused")
    assert sent < 24
    assert len(await finish(response)) == 24 << 20


async def test_closing_early_ends_the_workers_side(client: UpstreamClient, worker: ScriptedWorker) -> None:
    async def endless(seen: Seen, reply: Reply) -> None:
        await reply.begin_stream()
        await reply.gone()

    worker.script = endless
    response = await send(client, worker)
    response.close()
    await until(lambda: worker.open == 0, "the worker saw the end", 1.0)


async def test_cancelling_while_waiting_ends_the_workers_side(client: UpstreamClient, worker: ScriptedWorker) -> None:
    async def silent(seen: Seen, reply: Reply) -> None:
        await reply.gone()

    worker.script = silent
    task = asyncio.create_task(send(client, worker))
    await until(lambda: len(worker.requests) == 1, "the request arrived")
    task.cancel()
    await until(lambda: worker.open == 0, "the worker saw the end", 1.0)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_redirect_is_an_answer_like_any_other(client: UpstreamClient, worker: ScriptedWorker) -> None:
    """Case 102."""

    async def away(seen: Seen, reply: Reply) -> None:
        await reply.whole(302, b"", "Location: http://192.0.2.1/\r\n")

    worker.script = away
    response = await send(client, worker)
    assert response.status == 302
    await finish(response)


@interpreted
async def test_a_name_that_resolves_to_a_link_local_address_is_not_talked_to(
    client: UpstreamClient, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 102: the URL's text was checked at registration; what a name resolves to is known only here."""

    def refuses(host: str) -> str:
        assert host == HOST
        raise ValueError("host '169.254.169.254' is a link-local, multicast or metadata address")

    monkeypatch.setattr("router.proxy.upstream.diallable_host", refuses)
    with pytest.raises(UpstreamConnectError, match="link-local"):
        await client.send(Url("localhost", worker.port), b"POST", b"/x", [], b"{}")
    await until(lambda: worker.open == 0, "hung up")
    assert worker.requests == []

"""One connection and its keeper at their edges: what a publisher, a peer that vanished, or a close can do to them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from router.stream.connection import MAX_READS, READ_BYTES, Connection, ConnectionLost, connect
from router.stream.subscription import Subscription
from router.stream.zmtp import SubscriberWire, frame
from tests.stream.publisher import HOST
from tests.stream.test_zmtp import GREETING, established, ready
from tests.support.waiting import until


class Heard:
    """A Subscriber that remembers."""

    def __init__(self, *, fails: bool = False) -> None:
        self.links = 0
        self.losses: list[str] = []
        self._fails = fails

    def linked(self) -> None:
        self.links += 1

    def unlinked(self, why: str) -> None:
        self.losses.append(why)
        if self._fails:
            raise RuntimeError("the sink's fault")

    def message(self, seq: bytes, payload: bytes) -> bool:
        return False

    def rejected(self, why: str) -> None:
        pass

    def step(self) -> bool:
        return False

    def rested(self) -> None:
        pass


@contextmanager
def listener() -> Iterator[tuple[socket.socket, str]]:
    with socket.create_server((HOST, 0)) as server:
        server.setblocking(False)
        yield server, f"tcp://{HOST}:{server.getsockname()[1]}"


async def accepted(server: socket.socket) -> socket.socket:
    peer, _ = await asyncio.get_running_loop().sock_accept(server)
    peer.sendall(GREETING + ready())
    return peer


async def test_a_connection_lost_while_it_is_closed_is_not_opened_anew() -> None:
    """An engine that ends and is taken out at the same moment."""
    heard = Heard()
    with listener() as (server, endpoint):
        subscription = Subscription(endpoint, "", heard)
        subscription.start()
        with await accepted(server):
            await until(lambda: heard.links, "linked")
        subscription.wake()
        await subscription.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert heard.losses == []


async def test_a_sink_that_fails_over_a_loss_does_not_end_the_subscription() -> None:
    heard = Heard(fails=True)
    with listener() as (server, endpoint):
        subscription = Subscription(endpoint, "", heard)
        subscription.start()
        try:
            with await accepted(server):
                await until(lambda: heard.links == 1, "linked")
            with await asyncio.wait_for(accepted(server), 5):
                await until(lambda: heard.links == 2, "linked again")
        finally:
            await subscription.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
async def test_a_host_that_vanished_is_noticed_within_a_minute_whatever_waits_to_be_acknowledged() -> None:
    with listener() as (server, endpoint):
        opening = asyncio.ensure_future(connect(endpoint, b"", lambda: None))
        with await accepted(server):
            connection = await opening
            options = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 50_000}
            for name, value in options.items():
                found = connection._socket.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
                assert found == value, name
            connection.close()


class Working(Heard):
    """Writes down what is asked of it. Some messages make work of two steps, others fail or take long."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.work = 0

    def unlinked(self, why: str) -> None:
        self.log.append("lost")

    def message(self, seq: bytes, payload: bytes) -> bool:
        assert not self.work, "what waits is dealt with before the next message"
        self.log.append(payload.decode())
        if payload == b"fails":
            raise RuntimeError("the sink's fault")
        if payload == b"slow":
            time.sleep(0.01)
        self.work = 2 if payload == b"work" else 0
        return bool(self.work)

    def rejected(self, why: str) -> None:
        self.log.append(why)

    def step(self) -> bool:
        self.work -= bool(self.work)
        if self.work:
            self.log.append("step")
        return bool(self.work)


async def test_messages_taken_together_are_handed_on_as_if_they_came_one_by_one() -> None:
    """Work in between comes first, a sink's failure costs one message, and a loss is told after all that came."""
    heard = Working()
    with listener() as (server, endpoint):
        subscription = Subscription(endpoint, "", heard)
        subscription.start()
        with await accepted(server) as peer:
            await until(lambda: heard.links, "linked")
            said = ["a", "work", "b", "fails", "c", "slow", "d", "work", "fails", *map(str, range(40))]
            pieces = [frame(b"", more=True) + frame(bytes(8), more=True) + frame(word.encode()) for word in said]
            peer.sendall(b"".join([*pieces[:3], frame(b"alone"), *pieces[3:]]))
        await until(lambda: "lost" in heard.log, "lost")
        await subscription.close()
    said.insert(3, "frames")
    told = [step for word in said for step in ([word, "step"] if word == "work" else [word])]
    assert heard.log == [*told, "lost"]


async def test_a_path_that_cannot_be_a_socket_is_named() -> None:
    with pytest.raises(ConnectionLost, match="too long"):
        await connect("ipc:///" + 200 * "x", b"", lambda: None)


class Scripted(socket.socket):
    """`arriving` is read from it, then zeros for ever; `takes`: bytes it sends at once."""

    arriving = b""
    takes = 1 << 20
    reads = 0

    def recv(self, size: int, flags: int = 0) -> bytes:
        self.reads += 1
        data, self.arriving = self.arriving, b""
        return data.ljust(size, b"\0") if self.reads > 1 or len(data) > size // 2 else data

    def send(self, data: Any, flags: int = 0) -> int:
        return super().send(data[: self.takes])


@contextmanager
def scripted(wire: SubscriberWire) -> Iterator[tuple[Scripted, Connection]]:
    ours, theirs = socket.socketpair()
    with theirs, Scripted(fileno=ours.detach()) as sock:
        sock.setblocking(False)
        connection = Connection(sock, wire, lambda: None)
        yield sock, connection
        connection.close()


async def test_a_long_message_gives_way_to_others_however_fast_it_comes() -> None:
    """Case 31: a publisher of hundreds of long frames would hold up every request."""
    with scripted(established()) as (sock, connection):
        sock.arriving = b"\x03" + (32 << 20).to_bytes(8, "big") + bytes(READ_BYTES - 9)
        assert connection.receive() == []
        assert sock.reads == MAX_READS


async def test_half_an_answer_is_not_followed_by_another() -> None:
    """A publisher that does not read: what it would read later would be no ZMTP."""
    with scripted(established()) as (sock, connection):
        sock.arriving, sock.takes = frame(b"\x04PING\x00\x0aagain", command=True), 5
        with pytest.raises(ConnectionLost, match="does not read"):
            connection.receive()

"""One TCP (or Unix) connection to a publisher on the event loop, plain or uvloop: opened here, drained by its owner."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from router.stream.zmtp import Message, SubscriberWire, ZmtpError

READ_BYTES = 64 * 1024
"""Read at once, and so what one rank keeps of its stream here; the rest waits in the kernel, and then at the publisher
(case 31)."""
MAX_READS = 64
"""In a row for one message that is not complete yet (4 MiB): however fast a publisher sends, the rest comes in the next
turn of the event loop."""
HANDSHAKE_S = 5.0
"""To connect, and then again to agree on the protocol."""
# A host that vanished without a word is noticed within a minute. The last one (ms) is for what we sent it last: while
# bytes wait to be acknowledged nothing probes, and giving up on them takes Linux a quarter of an hour.
_KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 50_000}


class ConnectionLost(Exception):
    """Why, in words to follow by the endpoint."""


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`tcp://host:port` → host without brackets, port."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


class Connection:
    """An established subscription. `ipv6`: over which family; `wake` is called whenever there may be something to read.

    Reading is level-triggered: what is left unread wakes again.
    """

    def __init__(self, sock: socket.socket, wire: SubscriberWire, wake: Callable[[], None]) -> None:
        self.ipv6 = sock.family == socket.AF_INET6
        self._socket = sock
        self._wire = wire
        self._drained = False  # the last read took all there was
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock.fileno(), wake)

    def receive(self, limit: int = 1) -> list[Message]:
        """The next messages, at most `limit`; none when none is complete. Raises ConnectionLost, after everything that
        came before it."""
        wire = self._wire
        reads = 0
        try:
            while not (messages := wire.take(limit)):
                if wire.outgoing:
                    self._answer()
                if self._drained or reads == MAX_READS:
                    self._drained = False
                    return []
                reads += 1
                data = self._socket.recv(READ_BYTES)
                if not data:
                    raise ConnectionLost("the connection was lost")
                self._drained = len(data) < READ_BYTES
                wire.received(data)
        except BlockingIOError:
            return []
        except ZmtpError as error:
            raise ConnectionLost(str(error)) from None
        except OSError as error:
            raise ConnectionLost(f"the connection was lost ({_words(error)})") from None
        return messages

    def _answer(self) -> None:
        outgoing = self._wire.outgoing
        with suppress(BlockingIOError):  # a peer that does not read gets no answer to its heartbeat
            if self._socket.send(outgoing) < len(outgoing):
                raise ConnectionLost("the publisher does not read")  # half an answer: the next would end up inside it
        outgoing.clear()

    def close(self) -> None:
        """At once; what is unread is dropped. Call it once."""
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()


async def connect(endpoint: str, topic: bytes, wake: Callable[[], None]) -> Connection:
    """Subscribe to `topic` at `tcp://host:port` (any address of the host that accepts) or `ipc://path`.

    Raises ConnectionLost when that fails: nothing listens, the name does not resolve, or it is no publisher.
    """
    loop = asyncio.get_running_loop()
    try:
        sock = await _dial(loop, endpoint)
    except (OSError, UnicodeError) as error:
        raise ConnectionLost(f"cannot connect: {_words(error)}") from None
    try:
        wire = SubscriberWire(topic)
        async with asyncio.timeout(HANDSHAKE_S):
            await _shake_hands(loop, sock, wire)
        return Connection(sock, wire, wake)
    except TimeoutError:
        sock.close()
        raise ConnectionLost("something accepts connections but does not speak ZMTP") from None
    except OSError as error:
        sock.close()
        raise ConnectionLost(f"the connection was lost ({_words(error)})") from None
    except ZmtpError as error:
        sock.close()
        raise ConnectionLost(str(error)) from None
    except BaseException:
        sock.close()
        raise


async def _dial(loop: asyncio.AbstractEventLoop, endpoint: str) -> socket.socket:
    """Case 15: a name with addresses of both families is tried at each of them."""
    if endpoint.startswith("ipc://"):
        return await _dial_one(loop, socket.AF_UNIX, endpoint.removeprefix("ipc://"))
    host, port = split_endpoint(endpoint)
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    failed: OSError = OSError(errno.EADDRNOTAVAIL, "the name has no address")
    for family, _, _, _, address in found:
        try:
            return await _dial_one(loop, family, address)
        except OSError as error:
            failed = error
    raise failed


async def _dial_one(loop: asyncio.AbstractEventLoop, family: int, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        if family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):  # macOS lacks two of them
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        async with asyncio.timeout(HANDSHAKE_S):
            await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


async def _shake_hands(loop: asyncio.AbstractEventLoop, sock: socket.socket, wire: SubscriberWire) -> None:
    while True:
        if wire.outgoing:
            await loop.sock_sendall(sock, bytes(wire.outgoing))
            wire.outgoing.clear()
        if wire.established:
            return
        data = await loop.sock_recv(sock, READ_BYTES)
        if not data:
            raise ZmtpError("something accepts connections but does not speak ZMTP")
        wire.received(data)
        wire.agree()


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror):
        if error.errno:
            return os.strerror(error.errno)
        if isinstance(error, TimeoutError):  # asyncio.timeout's has no number, and no words
            return "no answer"
    return str(error.args[-1])

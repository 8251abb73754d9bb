"""ZMQ sockets on an asyncio loop (plain or uvloop), without zmq.asyncio: its futures cost more than the receive.

A ZMQ file descriptor is edge-triggered: it wakes once, and any operation on the socket may swallow the wake-up. So
every owner drains its socket until it is empty, and asks its pump for another turn when it stops early.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import zmq

from router.stream.connection import split_endpoint
from router.stream.zmtp import KEPT_FRAMES, MAX_FRAME_BYTES

MAX_SOCKETS = 16_384
"""Per context: a rank has a DEALER while it asks. libzmq's own default is 1,023."""
RECONNECT_MS = (100, 1000)
"""First and largest wait between connection attempts."""


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context with room for a fleet's sockets; one a process."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


async def speaks_ipv6_only(endpoint: str) -> bool:
    """Whether libzmq must be told to use IPv6. Raises OSError or UnicodeError when the name does not resolve.

    With its IPv6 option on, libzmq takes the IPv6 address of a name that has both and never tries the other, so an
    engine at `localhost` that binds IPv4 only would stay deaf (cases 15, 17).
    """
    host, port = split_endpoint(endpoint)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return all(family == socket.AF_INET6 for family, *_ in found)


class Dealer:
    """A connected DEALER whose wake-ups go to `wake`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        *,
        ipv6: bool,
        receive_limit: int,
        wake: Callable[[], None],
    ) -> None:
        """`receive_limit`: messages libzmq queues.

        Raises zmq.ZMQError when the endpoint is malformed or the context has no more sockets.
        """
        self._socket = context.socket(zmq.DEALER)
        self._loop = asyncio.get_running_loop()
        options = {
            zmq.LINGER: 0,
            zmq.RCVHWM: receive_limit,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.IPV6: int(ipv6),
            zmq.RECONNECT_IVL: RECONNECT_MS[0],
            zmq.RECONNECT_IVL_MAX: RECONNECT_MS[1],
            zmq.HANDSHAKE_IVL: 5000,
        }
        try:
            for option, value in options.items():
                self._socket.setsockopt(option, value)
            self._socket.connect(endpoint)
        except BaseException:
            self._socket.close(0)
            raise
        self._loop.add_reader(self._socket.FD, wake)
        wake()  # what came before the reader was there has swallowed its wake-up

    def send(self, frames: list[bytes]) -> None:
        """Queue a message; raises zmq.Again rather than block."""
        self._socket.send_multipart(frames, zmq.NOBLOCK)

    def receive(self) -> list[bytes] | None:
        """The next message's first frames, or None when none is queued. (recv_multipart costs twice as much.)"""
        receive, more = self._socket.recv, self._socket.getsockopt
        try:
            frames = [receive(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        while more(zmq.RCVMORE):
            frame = receive(zmq.NOBLOCK)
            if len(frames) < KEPT_FRAMES:
                frames.append(frame)
        return frames

    def close(self) -> None:
        """Close at once; unread messages are dropped."""
        self._loop.remove_reader(self._socket.FD)
        self._socket.close(0)

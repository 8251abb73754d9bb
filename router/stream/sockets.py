"""ZMQ sockets on an asyncio loop (plain or uvloop), without zmq.asyncio: its futures cost more than the receive.

A ZMQ file descriptor is edge-triggered: it wakes once, and any operation on the socket may swallow the wake-up. So
every owner drains its socket until it is empty, and asks its pump for another turn when it stops early.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

MAX_FRAME_BYTES = 32 << 20
"""A larger frame makes libzmq drop the connection for good before the frame is allocated (case 9)."""
MAX_SOCKETS = 16_384
"""Per context: a rank has up to five (SUB, its monitor's two ends, DEALER, load SUB). libzmq's own default is 1,023."""
KEPT_FRAMES = 4
"""No message in the contract has more; further frames are read and not kept."""
RECONNECT_MS = (100, 1000)
"""First and largest wait between connection attempts: cheap for ever, and a restarted engine is heard within 1 s."""

_UP = zmq.Event.HANDSHAKE_SUCCEEDED
_DOWN = {
    zmq.Event.DISCONNECTED: "the connection was lost",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "something accepts connections but does not speak ZMTP",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "something accepts connections but is no ZMQ socket of the right kind",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the publisher asks for ZMQ authentication, which is not supported",
}


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context with room for a fleet's sockets; one a process."""
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """`tcp://host:port` → host without brackets, port."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


async def speaks_ipv6_only(endpoint: str) -> bool:
    """Whether libzmq must be told to use IPv6. Raises OSError or UnicodeError when the name does not resolve.

    With its IPv6 option on, libzmq takes the IPv6 address of a name that has both and never tries the other, so an
    engine at `localhost` that binds IPv4 only would stay deaf (cases 15, 17).
    """
    host, port = split_endpoint(endpoint)
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return all(family == socket.AF_INET6 for family, *_ in found)


class LinkChange(NamedTuple):
    """The publisher accepted the connection (`up`), or it is gone or failed, and why."""

    up: bool
    why: str


class LoopSocket:
    """A connected ZMQ socket whose wake-ups go to `wake`."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        endpoint: str,
        *,
        ipv6: bool,
        receive_limit: int,
        wake: Callable[[], None],
        subscribe: bytes | None = None,
        watch: bool = False,
    ) -> None:
        """`receive_limit`: messages libzmq queues. `watch`: report connection changes through `link_changes`.

        Raises zmq.ZMQError when the endpoint is malformed or the context has no more sockets.
        """
        self._socket = context.socket(kind)
        self._monitor: zmq.Socket[bytes] | None = None
        self._loop = asyncio.get_running_loop()
        try:
            self._set_options(ipv6, receive_limit)
            if watch:
                self._monitor = self._socket.get_monitor_socket(_UP | sum(_DOWN))
            if subscribe is not None:
                self._socket.setsockopt(zmq.SUBSCRIBE, subscribe)
            self._socket.connect(endpoint)
        except BaseException:
            self._close_sockets()
            raise
        for each in self._sockets():
            self._loop.add_reader(each.FD, wake)
        wake()  # what came before the readers were there has swallowed its wake-up

    def _set_options(self, ipv6: bool, receive_limit: int) -> None:
        options = {
            zmq.LINGER: 0,
            zmq.RCVHWM: receive_limit,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.IPV6: int(ipv6),
            zmq.RECONNECT_IVL: RECONNECT_MS[0],
            zmq.RECONNECT_IVL_MAX: RECONNECT_MS[1],
            zmq.HANDSHAKE_IVL: 5000,
            # A host that vanished without a word is noticed within a minute.
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 20,
            zmq.TCP_KEEPALIVE_INTVL: 10,
            zmq.TCP_KEEPALIVE_CNT: 3,
        }
        for option, value in options.items():
            self._socket.setsockopt(option, value)

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

    def link_changes(self) -> list[LinkChange]:
        """What happened to the connection since the last call, in order."""
        changes: list[LinkChange] = []
        if self._monitor is not None:
            with suppress(zmq.Again):
                while True:
                    event = zmq.Event(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"])
                    changes.append(LinkChange(event == _UP, _DOWN.get(event, "connected")))
        return changes

    def close(self) -> None:
        """Close at once; unread messages are dropped."""
        for each in self._sockets():
            self._loop.remove_reader(each.FD)
        self._close_sockets()

    def _sockets(self) -> list[zmq.Socket[bytes]]:
        return [self._socket] if self._monitor is None else [self._socket, self._monitor]

    def _close_sockets(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
        self._socket.close(0)

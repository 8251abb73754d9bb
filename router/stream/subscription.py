"""One SUB socket kept connected: opened, drained in slices, opened anew whenever its connection was lost."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import zmq

from router.stream.pump import Pump, running_pump
from router.stream.sockets import LoopSocket, speaks_ipv6_only

REOPEN_S = (0.1, 1.0)
"""First and largest wait before a lost or refused connection is opened anew."""
RESOLVE_RETRY_S = 2.0


class Subscriber(Protocol):
    """Who the messages are for. Called on the event loop."""

    def linked(self) -> None:
        """A publisher accepted the connection."""

    def unlinked(self, why: str) -> None:
        """The connection was lost, or could not be made for a reason worth telling."""

    def message(self, seq: bytes, payload: bytes) -> None:
        """A message of three frames under exactly our topic."""

    def rejected(self, why: str) -> None:
        """A message of another shape (frames) or under another topic that begins with ours (topic)."""

    def step(self) -> bool:
        """Work to be done before the next message is read; a bounded piece of it. False: there is none."""

    def rested(self) -> None:
        """This turn's work is over."""


class Subscription:
    """A SUB socket for `endpoint` on behalf of `subscriber`.

    libzmq connects again by itself after some failures and never after others (an oversized frame, a failed handshake:
    the socket is then dead for good, without a sign). So every lost connection ends its socket. It also keeps apart
    what two publisher processes sent: all that is read from one socket after the loss came before it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        topic: str,
        subscriber: Subscriber,
        *,
        receive_limit: int,
    ) -> None:
        """`receive_limit`: messages libzmq queues; beyond it TCP pushes back and the publisher drops (case 20)."""
        self.ipv6 = False
        """What the endpoint's host needs, once it is known."""
        self._context = context
        self._endpoint = endpoint
        self._topic = topic.encode()
        self._subscriber = subscriber
        self._receive_limit = receive_limit
        self._pump: Pump | None = None
        self._socket: LoopSocket | None = None
        self._opening: asyncio.Task[None] | None = None
        self._reopen_s = REOPEN_S[0]
        self._left: int | None = None  # messages still to be read from a lost connection, at most

    def start(self) -> None:
        """Connect, and keep connecting for ever. Call it once, on the running loop."""
        self._pump = running_pump()
        self._open_in(0.0)

    async def close(self) -> None:
        """Close the socket and stop the task; the subscriber hears nothing more. May be called twice."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        self._close_socket()

    def wake(self) -> None:
        """There may be work."""
        if self._pump is not None and self._socket is not None:
            self._pump.wake(self)

    def drain(self, until_s: float) -> bool:
        """For the pump."""
        socket, subscriber = self._socket, self._subscriber
        if socket is None:
            return False
        self._follow_link(socket)
        more = True
        while more and time.monotonic() < until_s:
            if not subscriber.step():
                more = self._read(socket)
        if not more and self._left is not None:
            self._close_socket()
            self._open_in(self._reopen_s)
        subscriber.rested()
        return more

    def _follow_link(self, socket: LoopSocket) -> None:
        """Before the messages: those of a new connection must find the subscriber told of it."""
        for change in socket.link_changes():
            if self._left is not None:
                return
            if change.up:
                self._reopen_s = REOPEN_S[0]
                self._subscriber.linked()
            else:
                self._left = self._receive_limit
                self._subscriber.unlinked(f"{change.why} ({self._endpoint})")

    def _read(self, socket: LoopSocket) -> bool:
        if self._left is not None:
            self._left -= 1
        frames = socket.receive() if self._left is None or self._left >= 0 else None
        if frames is None:
            return False
        if len(frames) != 3:
            self._subscriber.rejected("frames")
        elif frames[0] != self._topic:
            self._subscriber.rejected("topic")
        else:
            self._subscriber.message(frames[1], frames[2])
        return True

    def _open_in(self, delay_s: float) -> None:
        self._left = None
        if delay_s:
            self._reopen_s = min(2 * self._reopen_s, REOPEN_S[1])
        name = f"subscribe to {self._endpoint}"
        self._opening = asyncio.get_running_loop().create_task(self._open(delay_s), name=name)

    async def _open(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while self._socket is None:
            try:
                self.ipv6 = await speaks_ipv6_only(self._endpoint)
                self._socket = LoopSocket(
                    self._context,
                    zmq.SUB,
                    self._endpoint,
                    ipv6=self.ipv6,
                    receive_limit=self._receive_limit,
                    wake=self.wake,
                    subscribe=self._topic,
                    watch=True,
                )
            except (OSError, UnicodeError, zmq.ZMQError) as error:
                self._subscriber.unlinked(f"cannot connect to {self._endpoint}: {error}")
                await asyncio.sleep(RESOLVE_RETRY_S)
        self.wake()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._pump is not None:
            self._pump.forget(self)

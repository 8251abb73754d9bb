"""A publisher's connection kept: opened, drained in slices, opened anew whenever it was lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from typing import Protocol

from router.stream.connection import Connection, ConnectionLost, connect
from router.stream.pump import Pump, running_pump
from router.stream.zmtp import Message

log = logging.getLogger(__name__)

REOPEN_S = (0.1, 1.0)
"""First and largest wait before a lost or refused connection is opened anew: cheap for ever, and a restarted engine is
heard within a second."""
TAKEN = 16
"""Messages handed on between two looks at the clock."""


class Subscriber(Protocol):
    """Who the messages are for. Called on the event loop."""

    def linked(self) -> None:
        """A publisher accepted the connection."""

    def unlinked(self, why: str) -> None:
        """The connection was lost, or could not be made for a reason worth telling."""

    def message(self, seq: bytes, payload: bytes) -> bool:
        """A message of three frames under exactly our topic. True: there is work for `step` now."""

    def rejected(self, why: str) -> None:
        """A message of another shape (frames) or under another topic that begins with ours (topic)."""

    def step(self) -> bool:
        """A bounded piece of the work to be done before the next message is read. False: there is none."""

    def rested(self) -> None:
        """This turn's work is over."""


class Subscription:
    """A subscription to `topic` at `endpoint` (`tcp://host:port`, `ipc://path`) on behalf of `subscriber`.

    Messages of two connections are never mixed: all that came over one is handed out before its loss is told, so what
    two publisher processes sent is kept apart.
    """

    def __init__(self, endpoint: str, topic: str, subscriber: Subscriber) -> None:
        self.ipv6 = False
        """Whether the endpoint's host was reached over IPv6, once it was."""
        self._endpoint = endpoint
        self._topic = topic.encode()
        self._subscriber = subscriber
        self._pump: Pump | None = None
        self._connection: Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._unread: Iterator[Message] = iter(())  # taken off the connection, not handed on yet
        self._reopen_s = REOPEN_S[0]

    def start(self) -> None:
        """Connect, and keep connecting for ever. Call it once, on the running loop."""
        self._pump = running_pump()
        self._reopen(0.0)

    async def close(self) -> None:
        """Close the connection and stop the task; the subscriber hears nothing more. May be called twice."""
        self._close_connection()  # first: a connection found lost while we wait below would be opened anew
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)

    def wake(self) -> None:
        """There may be work."""
        if self._pump is not None and self._connection is not None:
            self._pump.wake(self)

    def drain(self, until_s: float) -> bool:
        """For the pump."""
        connection, subscriber = self._connection, self._subscriber
        if connection is None:
            return False
        more = busy = True
        clock = time.monotonic
        try:
            while more and clock() < until_s:
                if busy:
                    busy = subscriber.step()
                    continue
                busy = self._hand_on(subscriber)
                if not busy:
                    messages = connection.receive(TAKEN)
                    self._unread = iter(messages)
                    more = bool(messages)
        except ConnectionLost as lost:
            more = False
            self._close_connection()
            self._reopen(self._lost(lost))
        subscriber.rested()
        return more

    def _hand_on(self, subscriber: Subscriber) -> bool:
        """Gives what is unread to the subscriber. True: it has work to do before the next message."""
        message = subscriber.message
        for found in self._unread:
            if isinstance(found, str):
                subscriber.rejected(found)
                continue
            seq, payload = found
            if message(seq, payload):
                return True
        return False

    def _lost(self, why: ConnectionLost) -> float:
        """Tells the subscriber; returns how long to wait before the next attempt (s)."""
        try:
            self._subscriber.unlinked(f"{why} ({self._endpoint})")
        except Exception:  # as in the pump: it costs this word, not the connection that is still to be opened
            log.exception("a stream's sink failed; the stream goes on")
        wait_s, self._reopen_s = self._reopen_s, min(2 * self._reopen_s, REOPEN_S[1])
        return wait_s

    def _reopen(self, delay_s: float) -> None:
        name = f"subscribe to {self._endpoint}"
        self._opening = asyncio.get_running_loop().create_task(self._open(delay_s), name=name)

    async def _open(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while True:
            try:
                connection = await connect(self._endpoint, self._topic, self.wake)
                break
            except ConnectionLost as lost:
                wait_s = self._lost(lost)
            await asyncio.sleep(wait_s)
        self._connection = connection
        self.ipv6 = connection.ipv6
        self._reopen_s = REOPEN_S[0]
        self._subscriber.linked()
        self.wake()  # for what came with the handshake

    def _close_connection(self) -> None:
        self._unread = iter(())
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._pump is not None:
            self._pump.forget(self)

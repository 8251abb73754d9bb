"""Several processes of a machine speak to the replicas at one address: what each publishes goes out again, unchanged.

Replicas' messages reach the processes directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq

from router.siblings.exchange import publisher_at
from router.siblings.frames import LOAD_TOPIC, REPLY_TOPIC
from router.stream.sockets import new_context
from router.stream.subscription import Subscription


class Relay:
    """From the processes' `sources` to `listen`."""

    def __init__(self, listen: str, sources: Sequence[str]) -> None:
        self._listen = listen
        self._context = new_context()
        self._publisher: zmq.Socket[bytes] | None = None
        self._subscriptions = [
            Subscription(source, topic.decode(), _Passing(self, topic))
            for source in sources
            for topic in (LOAD_TOPIC, REPLY_TOPIC)
        ]

    def start(self) -> None:
        """Raises ConfigError when the address cannot be had."""
        self._publisher = publisher_at(self._context, self._listen)
        for subscription in self._subscriptions:
            subscription.start()

    async def close(self) -> None:
        await asyncio.gather(*(subscription.close() for subscription in self._subscriptions))
        if self._publisher is not None:
            self._publisher.close(0)
        self._context.destroy(linger=0)

    def send(self, frames: list[bytes]) -> None:
        if self._publisher is not None:
            self._publisher.send_multipart(frames, zmq.NOBLOCK)


class _Passing:
    """Implements router.stream.subscription.Subscriber."""

    def __init__(self, relay: Relay, topic: bytes) -> None:
        self._relay = relay
        self._topic = topic

    def linked(self) -> None: ...

    def unlinked(self, why: str) -> None: ...

    def message(self, seq: bytes, payload: bytes) -> bool:
        self._relay.send([self._topic, seq, payload])
        return False

    def rejected(self, why: str) -> None: ...

    def step(self) -> bool:
        return False

    def rested(self) -> None: ...

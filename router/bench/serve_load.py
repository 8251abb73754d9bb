"""The clients of `bench serve`: connections that ask one question after the other, as fast as they are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from httptools import HttpResponseParser


@dataclass(slots=True)
class Load:
    """What all connections of one scenario share."""

    body: Callable[[int], bytes]
    sent: int = 0
    answered: int = 0
    errors: int = 0
    running: bool = True
    left: set[_Client] = field(default_factory=set)
    over: asyncio.Future[None] | None = None

    def next_request(self) -> bytes:
        body = self.body(self.sent)
        self.sent += 1
        head = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: "
        )
        return b"%b%d\r\n\r\n%b" % (head, len(body), body)

    def done(self, client: _Client) -> None:
        self.left.discard(client)
        if not self.left and self.over is not None and not self.over.done():
            self.over.set_result(None)


class _Client(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self._load = load
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)
        self._load.left.add(self)
        self._transport.write(self._load.next_request())

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        load = self._load
        load.answered += 1
        load.errors += self._parser.get_status_code() != 200
        if load.running:
            self._transport.write(load.next_request())
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.errors += self._load.running
        self._load.done(self)


async def begin(load: Load, host: str, port: int, connections: int) -> None:
    """Connects everybody, each with its first request under way."""
    loop = asyncio.get_running_loop()
    for _ in range(connections):
        await loop.create_connection(lambda: _Client(load), host, port)


async def end(load: Load, within_s: float) -> None:
    """Lets the last answers come. Raises TimeoutError."""
    load.running = False
    if load.left:
        load.over = asyncio.get_running_loop().create_future()
        await asyncio.wait_for(load.over, within_s)

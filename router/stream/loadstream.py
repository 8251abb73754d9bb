"""One rank's load reports (SGLang's `--load-publish-endpoint`; engine contract, section 4)."""

from __future__ import annotations

import asyncio
import time

import zmq

from router.stream.pump import Pump, running_pump
from router.stream.sink import LoadSink
from router.stream.sockets import LoopSocket, speaks_ipv6_only

RECEIVE_LIMIT = 100
RETRY_S = 5.0


class LoadStream:
    """Gives `sink` the newest report of each reading. Reports skipped cost nothing: the totals in them are cumulative.

    `topic` must equal the topic frame. The sink is called on the event loop, only between `start` and `close`.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        topic: str,
        sink: LoadSink,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._sink = sink
        self._topic = topic.encode()
        self._pump: Pump | None = None
        self._opening: asyncio.Task[None] | None = None
        self._socket: LoopSocket | None = None

    def start(self) -> None:
        """Connect, and keep connecting for ever. Call it once, on the running loop."""
        self._pump = running_pump()
        self._opening = asyncio.get_running_loop().create_task(self._open(), name=f"load of {self._endpoint}")

    async def close(self) -> None:
        """Close the socket and stop the task. May be called twice."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self._pump is not None:
            self._pump.forget(self)
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _open(self) -> None:
        while self._socket is None:
            try:
                self._socket = LoopSocket(
                    self._context,
                    zmq.SUB,
                    self._endpoint,
                    ipv6=await speaks_ipv6_only(self._endpoint),
                    receive_limit=RECEIVE_LIMIT,
                    wake=self._wake,
                    subscribe=self._topic,
                )
            except (OSError, zmq.ZMQError):
                await asyncio.sleep(RETRY_S)  # load is optional: without it the router's own accounting serves

    def _wake(self) -> None:
        if self._pump is not None:
            self._pump.wake(self)

    def drain(self, until_s: float) -> bool:
        """Handle queued reports until `until_s`. For the pump."""
        newest: bytes | None = None
        more = True
        while more and self._socket is not None and time.monotonic() < until_s:
            frames = self._socket.receive()
            if frames is None:
                more = False
            elif len(frames) != 3:
                self._sink.rejected("frames")
            elif frames[0] != self._topic:
                self._sink.rejected("topic")
            else:
                newest = frames[2]
        if newest is not None:
            self._sink.load(newest)
        return more and self._socket is not None

"""One rank's load reports (SGLang's `--load-publish-endpoint`; engine contract, section 4)."""

from __future__ import annotations

from router.stream.sink import LoadSink
from router.stream.subscription import Subscription


class LoadStream:
    """Gives `sink` the newest report of each reading. Reports skipped cost nothing: the totals in them are cumulative.

    `topic` must equal the topic frame. The sink is called on the event loop, only between `start` and `close`.
    """

    def __init__(self, endpoint: str, topic: str, sink: LoadSink) -> None:
        """`endpoint`: `tcp://host:port`."""
        self._sink = sink
        self._newest: bytes | None = None
        self._subscription = Subscription(endpoint, topic, self)

    def start(self) -> None:
        """Connect, and keep connecting for ever. Call it once, on the running loop."""
        self._subscription.start()

    async def close(self) -> None:
        """Close the socket and stop the task. May be called twice."""
        await self._subscription.close()

    def linked(self) -> None:
        """Load is optional: without reports the router's own accounting serves, so the link is nobody's concern."""

    def unlinked(self, why: str) -> None:
        """See `linked`."""

    def message(self, seq: bytes, payload: bytes) -> bool:
        self._newest = payload
        return False

    def rejected(self, why: str) -> None:
        self._sink.rejected(why)

    def step(self) -> bool:
        return False

    def rested(self) -> None:
        newest, self._newest = self._newest, None
        if newest is not None:
            self._sink.load(newest)

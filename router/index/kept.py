"""Events that wait until it is known how to read them. Pure."""

from __future__ import annotations

from router.contract.events import BlockRemoved, BlockStored, Event

_KEPT_BYTES = 2 * 1024 * 1024  # of events, per rank, while width or hash kind is open


class Kept:
    """Events to be applied later or again, in bounded memory. They are detached from the message they came in."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._bytes = 0

    def add(self, event: Event) -> bool:
        """False: no room, and everything kept was dropped, since a part would say something else."""
        self._bytes += 200
        if isinstance(event, BlockStored | BlockRemoved):
            self._bytes += 48 * len(event.block_hashes)
        if isinstance(event, BlockStored):
            event.token_ids = event.token_ids.copy()
            self._bytes += len(event.token_ids)
            if event.extra_keys is not None:
                event.extra_keys = event.extra_keys.copy()
                self._bytes += len(event.extra_keys)
        if self._bytes > _KEPT_BYTES:
            self.events = []
            return False
        self.events.append(event)
        return True

    def take(self) -> list[Event]:
        events, self.events, self._bytes = self.events, [], 0
        return events

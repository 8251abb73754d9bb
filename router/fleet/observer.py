"""What the fleet tells whoever counts: one method for each thing that happens, so that metrics stay out of here."""

from __future__ import annotations

from typing import Protocol


class FleetObserver(Protocol):
    """Called from the event loop, synchronously; must be quick and must not raise. `worker` is the normalised URL."""

    def worker_state(self, worker: str, state: str) -> None:
        """A worker was added (`starting`) or changed state. Only `ready` counts as up."""

    def worker_removed(self, worker: str) -> None:
        """The worker left the fleet: every series that names it must vanish (public cases 32, 98)."""

    def rank_state(self, worker: str, rank: int, state: str) -> None:
        """A rank appeared or its stream changed state."""

    def rank_removed(self, worker: str, rank: int) -> None:
        """The worker's new incarnation has no such rank."""

    def events(self, worker: str, rank: int, kind: str, count: int) -> None:
        """`count` (> 0) events of one kind were taken from a batch: stored, removed, cleared, skipped."""

    def event_lag(self, lag_s: float) -> None:
        """Wall-clock age of the oldest live batch of a turn, when all of them were applied. Both clocks' skew is in it;
        never negative."""

    def batches_lost(self, worker: str, rank: int, batches: int) -> None:
        """Batches that neither the stream nor its replay delivered."""

    def gap(self, worker: str, rank: int) -> None:
        """The sequence had a hole."""

    def restart(self, worker: str, rank: int) -> None:
        """The publisher started again."""

    def replay(self, worker: str, rank: int, outcome: str) -> None:
        """A replay request ended."""

    def rejected(self, worker: str, rank: int, kind: str) -> None:
        """A message was unusable: frames, payload, load, rank (a batch names another one), error (a fault of ours)."""

    def drift(self, worker: str, kind: str, active: bool) -> None:
        """The engine's contract is broken in this way, or no longer is."""


class NullObserver:
    """Counts nothing."""

    def worker_state(self, worker: str, state: str) -> None: ...
    def worker_removed(self, worker: str) -> None: ...
    def rank_state(self, worker: str, rank: int, state: str) -> None: ...
    def rank_removed(self, worker: str, rank: int) -> None: ...
    def events(self, worker: str, rank: int, kind: str, count: int) -> None: ...
    def event_lag(self, lag_s: float) -> None: ...
    def batches_lost(self, worker: str, rank: int, batches: int) -> None: ...
    def gap(self, worker: str, rank: int) -> None: ...
    def restart(self, worker: str, rank: int) -> None: ...
    def replay(self, worker: str, rank: int, outcome: str) -> None: ...
    def rejected(self, worker: str, rank: int, kind: str) -> None: ...
    def drift(self, worker: str, kind: str, active: bool) -> None: ...

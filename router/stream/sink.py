"""What the streams call. Everything here runs on the event loop and must not block."""

from __future__ import annotations

from typing import Protocol


class RankSink(Protocol):
    """Receives what one (worker, rank) publishes. `router.fleet` implements it."""

    def apply(self, seq: int, payload: bytes) -> None:
        """One batch, exactly once and in order: since the last `reset` the numbers have no hole."""

    def rested(self) -> None:
        """The turn of the event loop in which batches were given (or none) is over."""

    def reset(self, reason: str) -> None:
        """Whatever this rank was believed to hold is void."""

    def state_changed(self, state: str, reason: str, history: str) -> None:
        """State (connecting, replaying, live, gapped, duplicated, unreachable), why, how far history goes back."""

    def gap(self) -> None:
        """A hole in the sequence was seen; once a hole, whether or not replay fills it."""

    def lost(self, batches: int) -> None:
        """So many batches will never be had."""

    def restarted(self) -> None:
        """Another publisher process took over, or this one said that it ends."""

    def replayed(self, outcome: str) -> None:
        """One replay effort is over: filled, partial, unfilled, timeout, empty or cancelled."""

    def rejected(self, why: str) -> None:
        """A message was dropped whole: frames, seq, topic, duplicate, late or replay (label values, no sentences)."""


class LoadSink(Protocol):
    """Receives one rank's load reports."""

    def load(self, payload: bytes) -> None:
        """The newest report's msgpack bytes (`router.contract.load` decodes them); older unread ones are skipped."""

    def rejected(self, why: str) -> None:
        """A message was dropped whole: frames or topic."""

"""Asking the ROUTER again for batches that are missing: the wire's two forms, and how long to keep asking. No I/O.

What it answers cannot be taken at its word (engine contract, section 3): a start older than its buffer silently begins
later, its high-water mark drops batches and even the end mark without a sign, and a number that the engine burned
(SGLang counts before it encodes) is in no buffer at all. So every answer is checked for holes, asked again from the
first hole, and given up after a bounded number of answers that brought nothing new (case 21).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

END_SEQ = 2**64 - 1
"""Sequence number of an end mark, in a replay and on the live stream (case 8)."""
SEQ_BYTES = 8


class ReplayBatch(NamedTuple):
    """One answer; `seq == END_SEQ` marks the end and has no payload."""

    seq: int
    payload: bytes


def encode_request(start: int) -> list[bytes]:
    """Frames a DEALER sends: the empty delimiter a REQ would have added, then the first number wanted."""
    return [b"", start.to_bytes(SEQ_BYTES, "big")]


def decode_reply(frames: Sequence[bytes]) -> ReplayBatch | None:
    """`[b"", seq, payload]` (SGLang to 0.5.20, vLLM to 0.24) or `[b"", topic, seq, payload]` (later). None: neither."""
    if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != SEQ_BYTES:
        return None
    return ReplayBatch(int.from_bytes(frames[-2], "big"), frames[-1])


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """Bounds on one rank's recovery. A rank that waits has no credit but still serves by load."""

    held_batches: int = 20_000
    held_bytes: int = 64 << 20
    replay_quiet_s: float = 1.5
    """No answer for this long ends an attempt. ROUTERs answer between queue waits of up to 100 ms."""
    replay_total_s: float = 60.0
    replay_stalls: int = 3
    """Attempts in a row that bring no missing batch before the hole is given up."""
    replay_cooldown_s: float = 5.0
    """After a replay socket that never answered, holes are given up at once for this long."""
    unreachable_after_s: float = 5.0
    duplicate_calm_s: float = 3.0
    """Of two publishers, one is taken to be gone when only the other was heard for this long."""


Purpose = Literal["join", "gap", "reconnect"]


@dataclass(slots=True)
class Recovery:
    """One effort to get missing batches: one or more asks, one at a time, under one budget."""

    purpose: Purpose
    began_s: float
    ask: int = -1
    heard_s: float = 0.0
    stalls: int = 0
    answered: bool = False
    """Any answer ever came: the socket works, so that giving up needs no cooldown."""
    progressed: bool = False
    """The current ask brought a batch that was missing."""

    def asked(self, ask: int, now_s: float) -> None:
        self.ask, self.heard_s, self.progressed = ask, now_s, False

    def spent(self, limits: StreamLimits, now_s: float) -> bool:
        """Account for a finished ask; True when no further one is worth it."""
        self.stalls = 0 if self.progressed else self.stalls + 1
        return self.stalls >= limits.replay_stalls or now_s - self.began_s >= limits.replay_total_s

    def deadline_s(self, limits: StreamLimits) -> float:
        return min(self.heard_s + limits.replay_quiet_s, self.began_s + limits.replay_total_s)


def behind_last_hole(seqs: Iterable[int]) -> int:
    """Where the last run of consecutive numbers begins. Raises IndexError when there are none."""
    waiting = sorted(seqs)
    return next((b for a, b in zip(waiting[-2::-1], waiting[:0:-1], strict=True) if a + 1 != b), waiting[0])


def numbers(first: int, end: int) -> str:
    """The batches `first` to `end` - 1, in words."""
    return f"batch {first}" if end == first + 1 else f"batches {first} to {end - 1}"

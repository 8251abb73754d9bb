"""The access log: one JSON line on stdout for every finished request, with the decision, tokens and timings.

A line costs about 2 µs. Lines are gathered and written by a thread: a slow reader of stdout holds up nobody, and
what does not fit is dropped and counted.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import msgspec

from router.observe.requests import Placed
from router.proxy.plan import RequestRecord

QUIET_ROUTES = frozenset({"/health", "/ready", "/metrics"})
MAX_HELD_BYTES = 4 << 20
WRITE_EVERY_S = 0.2


class AccessLine(msgspec.Struct, omit_defaults=True):
    """Tokens and seconds. What is unknown is left out."""

    ts: float
    request_id: str
    method: str
    route: str
    status: int
    outcome: str
    duration_s: float
    ttft_s: float | None = None
    queued_s: float | None = None
    error: str | None = None
    model: str | None = None
    worker: str | None = None
    rank: int | None = None
    decode_worker: str | None = None
    decode_rank: int | None = None
    attempts: int = 0
    reason: str | None = None
    ids: str | None = None
    prompt_tokens: int | None = None
    predicted_cached_tokens: int | None = None
    best_cached_tokens: int | None = None
    reported_prompt_tokens: int | None = None
    reported_cached_tokens: int | None = None
    completion_tokens: int | None = None


class AccessLog:
    """A sink of router.observe.requests. `write` gets whole lines, in a thread of its own."""

    def __init__(
        self,
        *,
        write: Callable[[bytes], object] = lambda data: _write_all(1, data),
        dropped: Callable[[], None] = lambda: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._write = write
        self._dropped = dropped
        self._wall_clock = wall_clock
        self._encode = msgspec.json.Encoder().encode
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access log", daemon=True)
        self._thread.start()

    def finished(self, record: RequestRecord, placed: Placed | None) -> None:
        if record.route in QUIET_ROUTES:
            return
        if self._held_bytes > MAX_HELD_BYTES:
            self._dropped()
            return
        line = self._encode(access_line(self._wall_clock(), record, placed)) + b"\n"
        with self._lock:
            self._held.append(line)
            self._held_bytes += len(line)

    def close(self) -> None:
        """Writes what is left, for at most a second: a reader that is gone must not keep the process."""
        self._closing.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            last = self._closing.wait(WRITE_EVERY_S)
            with self._lock:
                lines, self._held = self._held, []
            if lines:
                try:
                    self._write(b"".join(lines))
                except OSError:  # nobody reads stdout any more
                    pass
                with self._lock:
                    self._held_bytes -= sum(map(len, lines))
            if last:
                return


def access_line(ts: float, record: RequestRecord, placed: Placed | None) -> AccessLine:
    line = AccessLine(
        round(ts, 6),
        record.request_id,
        record.method,
        record.route,
        record.status,
        record.outcome,
        round(record.duration_s, 6),
        None if record.ttft_s is None else round(record.ttft_s, 6),
        None if record.queued_s is None else round(record.queued_s, 6),
        record.error,
        worker=record.worker,
        attempts=record.attempts,
    )
    if placed is not None:
        decision = placed.decision
        line.model = placed.model
        line.rank = decision.targets[decision.position].number
        if placed.decode is not None:
            line.decode_worker = placed.decode.worker.url.text
            line.decode_rank = placed.decode.number
        line.reason = decision.reason
        line.ids = placed.ids_source
        line.prompt_tokens = placed.prompt_tokens
        line.predicted_cached_tokens = decision.credits[decision.position][3]
        line.best_cached_tokens = decision.best_cached_tokens
    usage = record.usage
    if usage is not None:
        line.reported_prompt_tokens = usage.prompt_tokens
        line.reported_cached_tokens = usage.cached_tokens
        line.completion_tokens = usage.completion_tokens
    return line


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]

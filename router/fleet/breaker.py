"""One worker's circuit breaker for answers that say the engine itself failed (500, 502, 504). Pure.

Broken connections are not its business: `Health` takes a worker that refuses or resets out at once, and probes bring it
back. A breaker is for the engine whose /health is well and whose every answer is an error (case 91). 4xx, 429, 503 and
clients that leave are neutral (case 89).
"""

from __future__ import annotations

FAULTS_TO_OPEN = 5
"""Server errors in a row, with no good answer between them."""
FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 60.0


class Breaker:
    """Closed → open after FAULTS_TO_OPEN → half open after a wait: one request tries; a good answer closes it, another
    server error opens it for twice as long."""

    __slots__ = ("_faults", "_open_until_s", "_trying", "_wait_s", "tripped")

    def __init__(self) -> None:
        self.tripped = False
        """Open or half open."""
        self._faults = 0
        self._wait_s = FIRST_WAIT_S
        self._open_until_s = 0.0
        self._trying = False

    def admits(self, now_s: float) -> bool:
        """A request may go to the worker now."""
        return not self.tripped or (now_s >= self._open_until_s and not self._trying)

    def placed(self) -> None:
        """A request went to the worker: if the breaker is not closed, it is the trial."""
        self._trying = self.tripped

    def fault(self, now_s: float) -> None:
        """A request was answered 500, 502 or 504."""
        self._faults += 1
        if self._trying:
            self._wait_s = min(self._wait_s * 2, LONGEST_WAIT_S)
            self._open_until_s = now_s + self._wait_s
            self._trying = False
        elif not self.tripped and self._faults >= FAULTS_TO_OPEN:
            self.tripped = True
            self._open_until_s = now_s + self._wait_s

    def served(self) -> None:
        """A request was answered well."""
        if self._faults:
            self._faults = 0
            self._wait_s = FIRST_WAIT_S
            self.tripped = self._trying = False

    def neutral(self) -> None:
        """A request ended without saying anything about the worker; the next one may be the trial."""
        self._trying = False

    @property
    def state(self) -> str:
        """closed, open or half_open (its trial is under way)."""
        if not self.tripped:
            return "closed"
        return "half_open" if self._trying else "open"

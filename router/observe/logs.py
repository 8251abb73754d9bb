"""Log lines for people (`console`) or machines (`json`), on stderr, and a limiter so that a fault says its line once.

Prompts, token ids and keys are never logged (public cases 103 to 105): nothing here takes a request body.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_MAX_LIMITED_KEYS = 1024


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ts, level, logger, message, then the fields given by `extra`."""

    def __init__(self) -> None:
        super().__init__()
        self._encoder = msgspec.json.Encoder(enc_hook=str)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return self._encoder.encode(line).decode()


class ConsoleFormatter(logging.Formatter):
    """Time, level, message, then the fields as key=value. Control characters cannot forge a second line."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        fields = " ".join(f"{key}={value}" for key, value in _fields(record).items())
        line = f"{text}  {fields}" if fields else text
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def set_up(form: str, level: str) -> None:
    """Sends every `router.*` log to stderr in the given form (`json` or `console`)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else ConsoleFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Of every `router.*` log, at any time."""
    logging.getLogger("router").setLevel(level.upper())


class RateLimit:
    """Lets a line with the same key through once per `period_s`; bounded memory."""

    def __init__(self, period_s: float, clock: Callable[[], float]) -> None:
        self._period_s = period_s
        self._clock = clock
        self._last: OrderedDict[str, float] = OrderedDict()

    def allows(self, key: str) -> bool:
        now = self._clock()
        last = self._last.get(key)
        if last is not None and now - last < self._period_s:
            return False
        self._last[key] = now
        self._last.move_to_end(key)
        if len(self._last) > _MAX_LIMITED_KEYS:
            self._last.popitem(last=False)
        return True

"""Log lines: one a record, structured, not forgeable, not repeated."""

from __future__ import annotations

import json
import logging

from router.observe.logs import ConsoleFormatter, JsonFormatter, RateLimit


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "router.fleet", "levelname": "WARNING", "msg": message})
    made.__dict__.update(fields)
    return made


def test_json_lines_carry_the_fields_given_beside_the_message() -> None:
    line = json.loads(JsonFormatter().format(record("rank is deaf", worker="http://a:1", rank=3)))
    assert line["message"] == "rank is deaf"
    assert (line["worker"], line["rank"], line["level"], line["logger"]) == ("http://a:1", 3, "warning", "router.fleet")


def test_a_newline_in_a_value_cannot_forge_a_second_line() -> None:
    """case 105"""
    text = ConsoleFormatter().format(record("model unknown", model="x\n12:00:00 INFO all is well"))
    assert "\n" not in text
    assert json.loads(JsonFormatter().format(record("m", model="a\nb")))["model"] == "a\nb"


def test_the_same_line_passes_once_per_period() -> None:
    now = [0.0]
    limit = RateLimit(60.0, lambda: now[0])
    assert limit.allows("drift a")
    assert not limit.allows("drift a")
    assert limit.allows("drift b")
    now[0] = 60.0
    assert limit.allows("drift a")


def test_the_limiter_forgets_the_oldest_keys_instead_of_growing() -> None:
    limit = RateLimit(60.0, lambda: 0.0)
    for number in range(5000):
        limit.allows(str(number))
    assert len(limit._last) <= 1024

"""The access log: whole lines, off the loop, never a prompt, never in the way."""

from __future__ import annotations

import json
import threading
from typing import Any

from router.observe import access
from router.observe.access import AccessLog
from router.observe.requests import Requests
from router.proxy.plan import Outcome
from tests.observe.made import place, record


def lines_of(*records: Any, placed: bool = True) -> list[dict[str, Any]]:
    written: list[bytes] = []
    log = AccessLog(write=written.append, wall_clock=lambda: 1700000000.5)
    requests = Requests((log,))
    for one in records:
        if placed:
            place(requests, one.request_id)
        requests.done(one, failed=False)
    log.close()
    return [json.loads(line) for line in b"".join(written).splitlines()]


def test_a_line_has_request_id_decision_tokens_and_timings() -> None:
    assert lines_of(record("abc")) == [
        {
            "ts": 1700000000.5,
            "request_id": "abc",
            "method": "POST",
            "route": "/v1/completions",
            "status": 200,
            "outcome": "ok",
            "duration_s": 0.25,
            "ttft_s": 0.125,
            "model": "tiny",
            "worker": "http://engine-1:30000",
            "rank": 0,
            "attempts": 1,
            "reason": "prefix",
            "ids": "local",
            "prompt_tokens": 1000,
            "predicted_cached_tokens": 640,
            "best_cached_tokens": 640,
            "reported_prompt_tokens": 1000,
            "reported_cached_tokens": 624,
            "completion_tokens": 16,
        }
    ]


def test_a_refused_request_says_why_and_a_probe_says_nothing() -> None:
    refused = record(
        outcome=Outcome.REJECTED, status=404, error="model_not_found", worker=None, attempts=0, ttft_s=None, usage=None
    )
    (line,) = lines_of(refused, record(route="/health"), placed=False)
    assert (line["error"], line["status"]) == ("model_not_found", 404)
    assert "worker" not in line
    assert "ttft_s" not in line


def test_a_reader_that_stands_still_holds_up_nobody_and_costs_bounded_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr(access, "MAX_HELD_BYTES", 5000)
    goes_on, dropped = threading.Event(), []
    log = AccessLog(write=lambda data: goes_on.wait(20), dropped=lambda: dropped.append(1))
    for _ in range(100):
        log.finished(record(), None)
    goes_on.set()
    log.close()
    assert 50 < len(dropped) < 100


def test_a_reader_that_is_gone_is_no_error() -> None:
    def broken(data: bytes) -> None:
        raise BrokenPipeError

    log = AccessLog(write=broken)
    log.finished(record(), None)
    log.close()
    assert not log._thread.is_alive()

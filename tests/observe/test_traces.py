"""W3C trace context: passed through as it is, or continued by a span of our own when export is on."""

from __future__ import annotations

import re
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from router.observe.requests import Requests
from router.observe.traces import Traces
from router.proxy.plan import Outcome
from tests.observe.made import place, record

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}


def finished(headers: dict[str, str], *, sample: float = 1.0, placed: bool = True, **more: Any) -> tuple[Any, Any]:
    """(the traceparent the worker got, the exported spans)"""
    exporter = InMemorySpanExporter()
    traces = Traces("http://127.0.0.1:1/v1/traces", sample=sample, service_name="router", exporter=exporter)
    requests = Requests((traces,))
    traces.begin("r1", "/v1/completions", headers)
    ((name, value),) = traces.headers("r1")
    assert name == b"traceparent"
    if placed:
        place(requests)
    requests.done(record(**more), failed=False)
    traces.close()
    assert traces.headers("r1") == ()
    return value.decode(), exporter.get_finished_spans()


def test_the_workers_parent_is_our_span_and_ours_is_the_clients() -> None:
    sent, (span,) = finished(PARENT)
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", sent)
    assert sent == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == SPAN
    assert span.attributes["kv_router.reason"] == "prefix"
    assert span.attributes["kv_router.cached_tokens.predicted"] == 640
    assert span.attributes["kv_router.cached_tokens.reported"] == 624
    assert span.attributes["gen_ai.usage.output_tokens"] == 16
    assert span.resource.attributes["service.name"] == "router"


def test_a_trace_begins_here_when_the_client_has_none_or_a_broken_one() -> None:
    for headers in ({}, {"traceparent": "00-zz-1-01"}, {"traceparent": ""}):
        sent, (span,) = finished(headers)
        assert span.parent is None
        assert sent.split("-")[1] == f"{span.context.trace_id:032x}"


def test_what_is_not_sampled_is_not_exported_but_the_context_goes_on() -> None:
    sent, spans = finished({}, sample=0.0)
    assert int(sent[-2:], 16) & 1 == 0
    assert not spans
    sent, spans = finished({"traceparent": f"00-{TRACE}-{SPAN}-00"})
    assert sent.startswith(f"00-{TRACE}-")
    assert int(sent[-2:], 16) & 1 == 0
    assert not spans


def test_a_request_that_failed_is_marked_also_when_it_never_had_a_worker() -> None:
    _, (span,) = finished(
        PARENT, placed=False, outcome=Outcome.UPSTREAM_ERROR, status=503, error="no_worker", worker=None, usage=None
    )
    assert not span.status.is_ok
    assert span.attributes["error.type"] == "no_worker"


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector/v1", ""])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    from pathlib import Path

    from router.config import Overrides, build_config
    from router.errors import ConfigError

    with pytest.raises(ConfigError, match=r"traces\.endpoint"):
        build_config({"traces": {"endpoint": endpoint}}, Overrides(), {}, Path())
    with pytest.raises(ConfigError, match=r"traces\.sample: has no effect"):
        build_config({"traces": {"sample": 0.5}}, Overrides(), {}, Path())

"""OpenTelemetry spans of requests, sent to a collector by OTLP over HTTP. An extra: `pip install '.[otel]'`.

Without it (the default) W3C trace headers pass through the router unchanged. With it a request is a server span, child
of the client's, and the worker gets that span as its parent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from router import __version__
from router.errors import ConfigError
from router.observe.requests import Placed
from router.proxy.plan import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

TRACE_HEADERS = ("traceparent", "tracestate")
EXPORT_TIMEOUT_S = 3.0
"""For one batch with its retries; also what a collector that is gone adds to a stop."""
NO_HEADERS: tuple[tuple[bytes, bytes], ...] = ()


class Traces:
    """A sink of router.observe.requests. `begin` and `finished` are called once for each request that has a plan."""

    def __init__(
        self, endpoint: str, *, sample: float, service_name: str, exporter: SpanExporter | None = None
    ) -> None:
        """`sample`: share of the traces that begin here; a client's own decision is kept. Raises ConfigError."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(
                "traces.endpoint: OpenTelemetry is not installed; in a clone of the repository: pip install '.[otel]'"
            ) from None
        resource = Resource.create({"service.name": service_name, "service.version": __version__})
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample)), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter or OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))
        )
        self._tracer = self._provider.get_tracer("kv-router", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER
        self._failed = Status(StatusCode.ERROR)
        self._open: dict[str, Span] = {}

    def begin(self, request_id: str, route: str, headers: Mapping[str, str]) -> None:
        """The request's head and body are there. `headers` is case-insensitive."""
        carrier = {name: headers[name] for name in TRACE_HEADERS if name in headers}
        context = self._propagator.extract(carrier)
        attributes = {"http.route": route, "kv_router.request_id": request_id}
        self._open[request_id] = self._tracer.start_span(
            f"POST {route}", context=context, kind=self._kind, attributes=attributes
        )

    def headers(self, request_id: str) -> tuple[tuple[bytes, bytes], ...]:
        """What tells the worker its parent span; it replaces the client's `traceparent`."""
        span = self._open.get(request_id)
        if span is None:
            return NO_HEADERS
        at = span.get_span_context()
        return ((b"traceparent", b"00-%032x-%016x-%02x" % (at.trace_id, at.span_id, at.trace_flags)),)

    def finished(self, record: RequestRecord, placed: Placed | None) -> None:
        span = self._open.pop(record.request_id, None)
        if span is None:
            return
        if span.is_recording():
            span.set_attributes(_attributes(record, placed))
            if record.status >= 500:
                span.set_status(self._failed)
        span.end()

    def close(self) -> None:
        """Sends what is left. Blocks for as long as the collector takes: call it off the event loop."""
        self._provider.shutdown()


def _attributes(record: RequestRecord, placed: Placed | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "kv_router.outcome": str(record.outcome),
        "kv_router.attempts": record.attempts,
        "kv_router.duration_s": record.duration_s,
        "kv_router.ttft_s": record.ttft_s,
        "kv_router.queued_s": record.queued_s,
        "kv_router.worker": record.worker,
        "error.type": record.error,
    }
    if placed is not None:
        chosen = placed.decision.chosen
        found |= {
            "gen_ai.request.model": placed.model,
            "kv_router.rank": chosen.target.number,
            "kv_router.reason": placed.decision.reason,
            "kv_router.decode_worker": placed.decode.worker.url.text if placed.decode is not None else None,
            "kv_router.decode_rank": placed.decode.number if placed.decode is not None else None,
            "kv_router.ids": placed.ids_source,
            "kv_router.prompt_tokens": placed.prompt_tokens,
            "kv_router.cached_tokens.predicted": chosen.cached_by_tier[3],
            "kv_router.cached_tokens.best": placed.decision.best_cached_tokens,
            "kv_router.cost_s": chosen.cost_s,
        }
    if record.usage is not None:
        found |= {
            "gen_ai.usage.input_tokens": record.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": record.usage.completion_tokens,
            "kv_router.cached_tokens.reported": record.usage.cached_tokens,
        }
    return {name: value for name, value in found.items() if value is not None}

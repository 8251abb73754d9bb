"""Access log and spans of a whole router: configured, written, sent, and continued by the engine's headers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.e2e.conftest import Start, context, fake_engine, start_router
from tests.support.engine import FakeEngine
from tests.ui.test_live import ANSWER, PROMPT, ask

__all__ = ["context", "fake_engine", "start_router"]
Fake = Callable[..., Awaitable[FakeEngine]]


async def test_the_access_log_goes_to_stdout_when_it_is_asked_for(
    start_router: Start, fake_engine: Fake, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = await fake_engine(block_size=4)
    engine.bodies["/v1/completions"] = ANSWER
    for access in (True, False):
        router = await start_router({"url": engine.url}, log={"access": access})
        await router.live(engine.url)
        assert await ask(router) == 200
        async with router.session.post(f"{router.base}/v1/completions", data=b"{") as answer:
            assert answer.status == 400
        await router.service.stop(0.0)
        lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
        assert [line.get("error", "") for line in lines] == (["", "bad_json"] if access else [])
        if access:
            assert (lines[0]["worker"], lines[0]["reason"], lines[0]["reported_cached_tokens"]) == (
                engine.url,
                "only",
                20,
            )
            assert not any(isinstance(value, list) for line in lines for value in line.values())


async def test_spans_reach_a_collector_and_the_engine_gets_ours_as_parent(
    start_router: Start, fake_engine: Fake
) -> None:
    received: list[ExportTraceServiceRequest] = []

    async def collect(request: web.Request) -> web.Response:
        said = ExportTraceServiceRequest()
        said.ParseFromString(await request.read())
        received.append(said)
        return web.Response(content_type="application/x-protobuf")

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    engine = await fake_engine(block_size=4)
    engine.bodies["/v1/completions"] = ANSWER
    router = await start_router({"url": engine.url}, traces={"endpoint": collector, "service_name": "edge"})
    await router.live(engine.url)
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01", "tracestate": "v=1"}
    body = {"model": "tiny", "prompt": PROMPT}
    async with router.session.post(f"{router.base}/v1/completions", json=body, headers=headers) as answer:
        await answer.read()
    await router.route("/v1/completions", **body)  # a dry run is no request
    got = engine.headers["/v1/completions"]
    async with router.session.post(f"{router.base}/v1/completions", json={**body, "model": "none"}) as answer:
        assert answer.status == 404
    await asyncio.wait_for(router.service.stop(0.0), 10)
    await runner.cleanup()

    spans = [
        span for said in received for each in said.resource_spans for scope in each.scope_spans for span in scope.spans
    ]
    assert len(spans) == 2
    ours = next(span for span in spans if span.trace_id.hex() == trace)
    assert got["traceparent"] == f"00-{trace}-{ours.span_id.hex()}-01"
    assert got["tracestate"] == "v=1"
    assert ours.parent_span_id.hex() == "00f067aa0ba902b7"
    told = {pair.key: pair.value for pair in ours.attributes}
    assert told["kv_router.worker"].string_value == engine.url
    refused = next(span for span in spans if span is not ours)
    assert {pair.key: pair.value for pair in refused.attributes}["error.type"].string_value == "model_not_found"


async def test_a_collector_that_is_not_there_holds_up_no_request(start_router: Start, fake_engine: Fake) -> None:
    engine = await fake_engine(block_size=4)
    engine.bodies["/v1/completions"] = ANSWER
    router = await start_router({"url": engine.url}, traces={"endpoint": "http://127.0.0.1:9/v1/traces"})
    await router.live(engine.url)
    for _ in range(20):
        assert await asyncio.wait_for(ask(router), 5) == 200

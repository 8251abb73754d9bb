"""What the page is sent: the fleet, the decisions with how they ended, the curves; and who may have it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from router.observe.viewers import MAX_VIEWERS
from tests.e2e.conftest import Running, Start
from tests.index.streams import CHAIN, HASHES
from tests.support.engine import FakeEngine, stored
from tests.support.waiting import until
from tests.ui.events import events

Fake = Callable[..., Awaitable[FakeEngine]]
PROMPT = [*CHAIN, 1]
USAGE = b'{"prompt_tokens": 25, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 20}}'
ANSWER = b'{"choices": [], "usage": ' + USAGE + b"}"


async def with_blocks(start_router: Start, fake_engine: Fake, **settings: Any) -> tuple[Running, FakeEngine]:
    engine = await fake_engine(block_size=4)
    router = await start_router({"url": engine.url}, **settings)
    await engine.listened()
    engine.publish(stored(HASHES, CHAIN, 4))
    engine.bodies["/v1/completions"] = ANSWER

    async def known() -> bool:
        return [rank["blocks"] for rank in await router.ranks(engine.url)] == [{"GPU": len(HASHES)}]

    await router.until(known, "the published blocks")  # live alone says only that the stream is heard
    return router, engine


async def ask(router: Running) -> int:
    body = {"model": "tiny", "prompt": PROMPT}
    async with router.session.post(f"{router.base}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def test_a_viewer_sees_the_fleet_then_each_new_decision_and_how_it_ended(
    start_router: Start, fake_engine: Fake
) -> None:
    router, engine = await with_blocks(start_router, fake_engine)
    await router.live(engine.url)
    async with events(router) as seen:
        name, hello = await seen.next()
        assert name == "hello"
        (worker,) = hello["workers"]
        rank = dict(zip(hello["rank_fields"], worker["ranks"][0], strict=True))
        assert (worker["url"], worker["state"], worker["capacity_blocks"]) == (engine.url, "ready", 250)
        assert (rank["state"], rank["blocks_gpu"], rank["stored"]) == ("live", len(HASHES), 1)
        assert hello["decisions"] == []
        assert await ask(router) == 200
        decision = ended = None
        while decision is None or ended is None:
            name, tick = await seen.next()
            assert name == "tick"
            decision = next(iter(tick["decisions"]), decision)
            ended = (decision or {}).get("end") or tick["ended"].get("1") or ended
        assert (decision["worker"], decision["reason"], decision["cached"]) == (engine.url, "only", 24)
        assert (ended["outcome"], ended["reported"]) == ("ok", 20)
        rank = dict(zip(hello["rank_fields"], tick["workers"][0]["ranks"][0], strict=True))
        assert (rank["requests"], rank["prompt_tokens"], rank["cached_tokens"]) == (1, 25, 20)


async def test_a_page_opened_later_has_the_last_decisions_and_the_curves(
    start_router: Start, fake_engine: Fake
) -> None:
    router, engine = await with_blocks(start_router, fake_engine)
    await router.live(engine.url)
    for _ in range(3):
        assert await ask(router) == 200

    async with events(router) as first:
        _, hello = await first.next()
        sampled: list[dict[str, Any]] = []
        while sum(point["requests"] for point in sampled) < 3:
            _, tick = await first.next()
            if tick["point"]:
                sampled.append(dict(zip(hello["point_fields"], tick["point"], strict=True)))
        assert [point["ttft_p50_s"] for point in sampled if point["requests"]] != [None]
    async with events(router) as later:
        _, hello = await later.next()
    assert [one["number"] for one in hello["decisions"]] == [1, 2, 3]
    assert all(one["end"]["outcome"] == "ok" for one in hello["decisions"])
    assert sum(dict(zip(hello["point_fields"], point, strict=True))["requests"] for point in hello["points"]) == 3


async def test_drift_and_unready_workers_are_said_with_their_reasons(start_router: Start, fake_engine: Fake) -> None:
    engine = await fake_engine(block_size=8)
    router = await start_router({"url": engine.url}, {"url": "http://127.0.0.1:9"})
    await engine.listened()
    for _ in range(2):
        for hash_number, parent in zip(HASHES, [None, *HASHES], strict=False):
            at = HASHES.index(hash_number)
            engine.publish(stored([hash_number], CHAIN[4 * at : 4 * at + 4], 4, parent))

    async with events(router) as seen:
        drift: list[dict[str, Any]] = []
        while not drift:
            _, message = await seen.next()
            by_url = {worker["url"]: worker for worker in message["workers"]}
            drift = by_url[engine.url].get("drift", [])
    assert (drift[0]["kind"], drift[0]["advertised"], drift[0]["observed"]) == ("block_size", 8, 4)
    assert "kv_events.block_size" in drift[0]["advice"]
    down = by_url["http://127.0.0.1:9"]
    assert down["state"] in ("starting", "unhealthy")
    assert down["reason"]


async def test_the_page_is_open_and_its_data_wants_the_key(start_router: Start, fake_engine: Fake) -> None:
    engine = await fake_engine()
    settings = {"host": "127.0.0.1", "port": 0, "key": "sesame"}
    router = await start_router({"url": engine.url}, admin=settings)
    async with router.session.get(f"{router.admin}/ui") as answer:
        assert answer.status == 200
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert engine.url not in await answer.text()
    for path in ("/ui/events", f"/ui/worker?url={engine.url}"):
        async with router.session.get(f"{router.admin}{path}") as answer:
            assert answer.status == 401
    async with events(router, Authorization="Bearer sesame") as seen:
        assert (await seen.next())[0] == "hello"


async def test_one_worker_can_be_opened_and_an_unknown_one_cannot(start_router: Start, fake_engine: Fake) -> None:
    engine = await fake_engine()
    router = await start_router({"url": engine.url})
    await router.live(engine.url)
    worker = await router.get(f"{router.admin}/ui/worker?url={engine.url}")
    assert worker["ranks"][0]["state"] == "live"
    async with router.session.get(f"{router.admin}/ui/worker?url=http://x:1") as answer:
        assert (answer.status, answer.headers["x-kv-router-error"]) == (404, "not_found")


async def test_viewers_are_bounded_and_leave_no_trace(start_router: Start, fake_engine: Fake) -> None:
    router = await start_router({"url": (await fake_engine()).url})
    live = router.service._live
    answers = [await router.session.get(f"{router.admin}/ui/events") for _ in range(MAX_VIEWERS)]
    for answer in answers:
        assert await answer.content.readline() == b"event: hello\n"
    async with router.session.get(f"{router.admin}/ui/events") as refused:
        assert refused.status == 503
    for answer in answers:
        answer.close()
    await until(lambda: not live._viewers, "no viewer left")


async def test_a_router_that_stops_ends_its_pages(start_router: Start, fake_engine: Fake) -> None:
    router = await start_router({"url": (await fake_engine()).url})
    async with events(router) as seen:
        await seen.next()
        stopping = asyncio.create_task(router.service.stop(0.0))
        while not await seen.ended():
            await seen._answer.content.readline()
        await stopping


async def test_the_log_level_changes_while_the_router_runs(start_router: Start) -> None:
    import logging

    router = await start_router()
    before = logging.getLogger("router").level
    try:
        for level in ("debug", "error"):
            async with router.session.put(f"{router.admin}/log-level", json={"level": level}) as answer:
                assert (answer.status, await answer.json()) == (200, {"level": level})
            assert logging.getLogger("router").level == getattr(logging, level.upper())
        async with router.session.put(f"{router.admin}/log-level", json={"level": "loud"}) as answer:
            assert answer.status == 400
    finally:
        logging.getLogger("router").setLevel(before)


async def test_trace_headers_reach_the_engine_as_the_client_sent_them(start_router: Start, fake_engine: Fake) -> None:
    router, engine = await with_blocks(start_router, fake_engine)
    await router.live(engine.url)
    sent = {
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "tracestate": "v=1",
        "baggage": "a=b",
    }
    body = {"model": "tiny", "prompt": PROMPT}
    async with router.session.post(f"{router.base}/v1/completions", json=body, headers=sent) as answer:
        assert answer.status == 200
    assert {name: engine.headers["/v1/completions"].get(name) for name in sent} == sent

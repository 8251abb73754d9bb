"""The whole router: limits, breaker, control calls to every engine, and fields that clients may not send."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from router.fleet.breaker import FAULTS_TO_OPEN
from tests.e2e.conftest import Start
from tests.support.engine import FakeEngine
from tests.support.waiting import until

MakeEngine = Callable[..., Awaitable[FakeEngine]]
COMPLETIONS = "/v1/completions"
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": [1, 2, 3]}


async def ask(
    router: Any, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> tuple[int, str | None]:
    url = f"{router.base}{COMPLETIONS}"
    async with router.session.post(url, json=body or PROMPT, headers=headers) as answer:
        await answer.read()
        return answer.status, answer.headers.get("x-kv-router-error")


async def control(
    router: Any, path: str, data: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    async with router.session.post(f"{router.admin}{path}", data=data, headers=headers) as answer:
        return answer.status, await answer.json()


async def breaker(router: Any, url: str) -> str:
    (state,) = [w["breaker"] for w in await router.workers() if w["url"] == url]
    return str(state)


async def test_a_worker_gets_no_more_than_its_limit_and_the_rest_wait(
    start_router: Start, fake_engine: MakeEngine
) -> None:
    one, two = await fake_engine(), await fake_engine()
    for engine in (one, two):
        engine.delays[COMPLETIONS] = 0.3
    router = await start_router(
        {"url": one.url},
        {"url": two.url, "max_inflight": 1},
        admission={"max_inflight_per_worker": 2, "max_waiting": 2},
    )
    await router.live(one.url)
    await router.live(two.url)
    asked = [asyncio.create_task(ask(router)) for _ in range(6)]
    await until(lambda: router.service.listener.waiting + sum(task.done() for task in asked) == 3, "in line")
    per_worker = {w.url.text: w.inflight_requests for w in router.service.fleet.workers}
    assert per_worker == {one.url: 2, two.url: 1}
    assert await router.metric("waiting_requests") == 2
    answers = await asyncio.gather(*asked)
    assert sorted(status for status, _ in answers) == [200] * 5 + [429]
    assert "queue_full" in {error for _, error in answers}
    assert await router.metric("queue_wait_seconds_count") == 3
    assert await router.metric("worker_inflight_requests") == 0


async def test_an_engine_whose_every_answer_is_an_error_is_passed_over_although_its_health_is_well(
    start_router: Start, fake_engine: MakeEngine
) -> None:
    """Case 91, and the other half of case 89: when all are, their own errors reach the client."""
    sick, well = await fake_engine(), await fake_engine()
    sick.statuses[COMPLETIONS] = 500
    router = await start_router({"url": sick.url}, {"url": well.url}, policy={"name": "round_robin"})
    await router.live(sick.url)
    await router.live(well.url)
    statuses = [(await ask(router))[0] for _ in range(4 * FAULTS_TO_OPEN)]
    assert statuses.count(500) == FAULTS_TO_OPEN
    assert await router.metric("worker_breaker_open", worker=sick.url) == 1
    assert await breaker(router, sick.url) == "open"
    well.statuses[COMPLETIONS] = 500
    for _ in range(2 * FAULTS_TO_OPEN):
        assert await ask(router) == (500, None)
    async with router.session.get(f"{router.base}/ready") as ready:
        assert ready.status == 200, "no flapping with the breaker"


@pytest.mark.parametrize("status", [400, 404, 422, 429, 503])
async def test_an_answer_that_is_the_clients_fault_never_opens_the_breaker(
    start_router: Start, fake_engine: MakeEngine, status: int
) -> None:
    """Case 89."""
    engine = await fake_engine()
    engine.statuses[COMPLETIONS] = status
    router = await start_router({"url": engine.url})
    await router.live(engine.url)
    for _ in range(20):
        assert (await ask(router))[0] == status
    assert await breaker(router, engine.url) == "closed"


async def test_control_calls_reach_every_engine_and_each_answers_for_itself(
    start_router: Start, fake_engine: MakeEngine
) -> None:
    """Case 66: one of three is down, one refuses."""
    good, refusing, gone = await fake_engine(), await fake_engine(), await fake_engine()
    router = await start_router(
        {"url": good.url, "api_key": "k1"}, {"url": f"{refusing.url}/"}, {"url": gone.url}, worker_api_key="k2"
    )
    for engine in (good, refusing, gone):
        await router.live(engine.url)
    refusing.statuses["/flush_cache"], refusing.bodies["/flush_cache"] = 400, b"busy"
    await gone.stop_http()
    status, answer = await control(router, "/flush_cache?timeout_s=5")
    assert (status, answer["ok"]) == (502, False)
    told = {r["worker"]: (r["ok"], r["status"], r["body"], bool(r["error"])) for r in answer["results"]}
    assert told == {
        good.url: (True, 200, "", False),
        refusing.url: (False, 400, "busy", False),
        gone.url: (False, None, "", True),
    }
    assert ("/flush_cache", "Bearer k1") in good.requests
    assert ("/flush_cache", "Bearer k2") in refusing.requests
    status, answer = await control(router, f"/flush_cache?worker={good.url}/")
    assert (status, [r["worker"] for r in answer["results"]]) == (200, [good.url])
    async with router.session.post(f"{router.base}/flush_cache") as public:
        assert public.status == 404


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/abort_request", b"{}", "bad_request"),
        ("/abort_request", b'{"rid": ""}', "bad_request"),
        ("/abort_request", b'{"rid": ["a", ""]}', "bad_request"),
        ("/abort_request", b"[]", "bad_json"),
        ("/flush_cache?worker=http://127.0.0.1:9", b"", "not_found"),
        ("/flush_cache?worker=file:///etc", b"", "bad_request"),
        ("/flush_cache?timeout_s=-1", b"", "bad_request"),
        ("/flush_cache?timeout_s=nan", b"", "bad_request"),
    ],
)
async def test_a_control_call_that_would_mean_too_much_or_nobody_is_refused(
    start_router: Start, fake_engine: MakeEngine, path: str, body: bytes, code: str
) -> None:
    """Engines match rid by prefix: an empty one would end every request of the fleet."""
    engine = await fake_engine()
    router = await start_router({"url": engine.url})
    status, answer = await control(router, path, body)
    assert (answer["error"]["code"], status) == (code, {"bad_request": 400, "bad_json": 400, "not_found": 404}[code])
    assert engine.asked(path.partition("?")[0]) == 0


async def test_a_web_page_of_another_origin_cannot_reach_the_admin_listener(
    start_router: Start, fake_engine: MakeEngine
) -> None:
    engine = await fake_engine()
    router = await start_router({"url": engine.url})
    host = router.admin.removeprefix("http://")
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        status, answer = await control(router, "/flush_cache", headers=headers)
        assert (status, answer["error"]["code"]) == (403, "forbidden")
        async with router.session.delete(f"{router.admin}/workers?url={engine.url}", headers=headers) as refused:
            assert refused.status == 403
    assert engine.asked("/flush_cache") == 0
    own = {"Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    assert (await control(router, "/flush_cache", headers=own))[0] == 200


async def test_control_calls_want_the_admin_key(start_router: Start, fake_engine: MakeEngine) -> None:
    """Case 101: refused before any fan-out."""
    engine = await fake_engine()
    router = await start_router({"url": engine.url}, admin={"host": "127.0.0.1", "port": 0, "key": "s3cret"})
    assert (await control(router, "/flush_cache"))[0] == 401
    assert engine.asked("/flush_cache") == 0
    assert (await control(router, "/flush_cache", headers={"Authorization": "Bearer s3cret"}))[0] == 200


async def test_internal_fields_are_refused_and_ranks_checked_against_the_fleet(
    start_router: Start, fake_engine: MakeEngine
) -> None:
    """Case 107."""
    engine = await fake_engine(dp_size=2)
    router = await start_router({"url": engine.url})
    await router.live(engine.url, ranks=2)
    assert await ask(router, {**PROMPT, "routed_dp_rank": 1}) == (200, None)
    for body in (
        {"routed_dp_rank": 2},
        {"routed_dp_rank": 999},
        {"data_parallel_rank": -1},
        {"routed_dp_rank": "1"},
        {"bootstrap_host": "169.254.169.254"},
        {"kv_transfer_params": {"remote_host": "evil"}},
    ):
        assert await ask(router, {**PROMPT, **body}) == (400, "bad_request"), body
    assert await ask(router, headers={"X-Data-Parallel-Rank": "7"}) == (400, "bad_request")
    assert await ask(router, headers={"X-Data-Parallel-Rank": "1"}) == (200, None)
    assert engine.asked(COMPLETIONS) == 2
    open_router = await start_router(
        {"url": engine.url}, listen={"host": "127.0.0.1", "port": 0, "allow_internal_fields": True}
    )
    await open_router.live(engine.url, ranks=2)
    assert await ask(open_router, {**PROMPT, "bootstrap_host": "10.0.0.1"}) == (200, None)


async def test_what_the_parser_refuses_is_counted_without_a_label_of_its_own(
    start_router: Start, fake_engine: MakeEngine
) -> None:
    """Cases 97 and 99."""
    router = await start_router()
    port = router.service.listener.port
    for method in (b"GET", b"BREW", b"\x00\x01"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(method + b" /x HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n")
        assert b" 400 " in await reader.readline()
        writer.close()
    assert await router.metric("requests_total", route="unmatched", outcome="rejected") == 3


async def test_an_empty_model_name_means_the_only_model(start_router: Start, fake_engine: MakeEngine) -> None:
    """Case 93: the engines read it as not given; found by the fuzzer as a 503."""
    engine = await fake_engine()
    router = await start_router({"url": engine.url})
    await router.live(engine.url)
    assert await ask(router, {**PROMPT, "model": ""}) == (200, None)
    assert await ask(router, {**PROMPT, "model": "nope"}) == (404, "model_not_found")

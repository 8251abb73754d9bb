"""The router over simulated engines: what it predicts is what they report, on every route and form of prompt."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from router.engine.app import SimulatedEngine
from router.engine.options import EngineOptions
from router.engine.timing import TimingProfile
from tests.e2e.conftest import Running, Start
from tests.support.engine import FakeEngine
from tests.support.waiting import until

StartEngine = Callable[..., Awaitable[SimulatedEngine]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    made: list[SimulatedEngine] = []

    async def start(**options: Any) -> SimulatedEngine:
        engine = SimulatedEngine(EngineOptions(port=0, timing=TimingProfile(prefill_tokens_per_s=50_000), **options))
        made.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in made:
        await engine.stop()


async def settled(router: Running) -> None:
    """No request in flight and every rank's stream at rest since the last look."""
    seen: list[Any] = []

    async def still() -> bool:
        seen.append([(r["last_seq"], r["inflight_requests"]) for r in await router.ranks()])
        return len(seen) > 4 and all(look == seen[-1] for look in seen[-4:])

    await router.until(still, "streams at rest")


async def complete(router: Running, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    async with router.session.post(f"{router.base}{path}", json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json(), answer.headers


async def test_predicted_cached_tokens_equal_the_reported_ones_for_growing_chats(
    start_router: Start, start_engine: StartEngine
) -> None:
    engines = [await start_engine(), await start_engine(dp_size=2, page_size=64)]
    router = await start_router(*({"url": e.url} for e in engines))
    for engine in engines:
        await router.live(engine.url, engine.options.dp_size)
    rng, rows = random.Random(3), []
    talks: list[list[dict[str, str]]] = [
        [{"role": "system", "content": " ".join(f"rule {i % 2} word{n}" for n in range(60))}] for i in range(4)
    ]
    for _ in range(4):
        for talk in talks:
            talk.append({"role": "user", "content": " ".join(f"w{rng.randrange(99)}" for _ in range(40))})
            await settled(router)
            answer, headers = await complete(
                router, "/v1/chat/completions", {"model": "tiny", "messages": talk, "max_tokens": 8}
            )
            usage = answer["usage"]
            rows.append((int(headers["x-kv-router-cached-tokens"]), usage["prompt_tokens_details"]["cached_tokens"]))
            talk.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    assert [p for p, _ in rows] == [r for _, r in rows]
    assert sum(r for _, r in rows) > 0
    await settled(router)
    assert await router.metric("prompt_tokens_total") == await router.metric("reported_prompt_tokens_total")
    assert await router.metric("prediction_error_tokens_total") == 0
    assert await router.metric("decisions_total", reason="prefix") > 0


async def test_the_chosen_rank_serves_on_generate_too(start_router: Start, start_engine: StartEngine) -> None:
    """case 58"""
    engine = await start_engine(dp_size=4)
    router = await start_router({"url": engine.url})
    await router.live(engine.url, 4)
    for _ in range(6):
        body = {"input_ids": random.Random(_).choices(range(5, 4000), k=40), "sampling_params": {"max_new_tokens": 1}}
        answer, headers = await complete(router, "/generate", body)
        assert answer["meta_info"]["dp_rank"] == int(headers["x-kv-router-rank"])


async def test_a_rank_the_client_named_is_never_overridden(start_router: Start, start_engine: StartEngine) -> None:
    """case 58"""
    engine = await start_engine(dp_size=4)
    router = await start_router({"url": engine.url})
    await router.live(engine.url, 4)
    body = {"input_ids": [9] * 40, "routed_dp_rank": 3, "sampling_params": {"max_new_tokens": 1}}
    for _ in range(3):
        answer, _ = await complete(router, "/generate", body)
        assert answer["meta_info"]["dp_rank"] == 3
    decision = await router.route("/generate", **body)
    assert (decision["rank"], decision["reason"]) == (3, "client_rank")


async def test_route_has_no_side_effects(start_router: Start, start_engine: StartEngine) -> None:
    engine = await start_engine()
    router = await start_router({"url": engine.url})
    await router.live(engine.url)
    for _ in range(3):
        decision = await router.route("/v1/completions", model="tiny", prompt=[5] * 100)
        assert decision["prompt_tokens"] == 100
        assert [c["inflight_tokens"] for c in decision["candidates"]] == [0]
        assert [c["predicted_tokens"] for c in decision["candidates"]] == [0]
    assert await router.metric("decisions_total") == 0


async def test_a_streamed_answer_carries_the_engines_bytes_and_its_usage_is_counted(
    start_router: Start, start_engine: StartEngine
) -> None:
    engine = await start_engine()
    router = await start_router({"url": engine.url})
    await router.live(engine.url)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello there"}],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with router.session.post(f"{router.base}/v1/chat/completions", json=body) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        events = [line[6:] for line in (await answer.read()).split(b"\n\n") if line]
    assert events[-1] == b"[DONE]"
    usage = next(json.loads(e)["usage"] for e in reversed(events[:-1]) if json.loads(e).get("usage"))
    await settled(router)
    assert await router.metric("reported_prompt_tokens_total") == usage["prompt_tokens"]
    assert await router.metric("requests_total", route="/v1/chat/completions", outcome="ok") == 1
    assert await router.metric("worker_inflight_requests") == 0


async def test_a_compressed_body_is_passed_as_it_is_and_routed_by_load(
    start_router: Start, start_engine: StartEngine
) -> None:
    """case 72: what the engine makes of it is the engine's affair; this one refuses it"""
    engine = await start_engine(dp_size=2)
    router = await start_router({"url": engine.url})
    await router.live(engine.url, 2)
    packed = gzip.compress(json.dumps({"text": "hello", "sampling_params": {"max_new_tokens": 1}}).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with router.session.post(f"{router.base}/generate", data=packed, headers=headers) as answer:
        through = (answer.status, await answer.read())
    async with router.session.post(f"{engine.url}/generate", data=packed, headers=headers) as answer:
        direct = (answer.status, await answer.read())
    assert through[0] == direct[0]
    assert await router.metric("decisions_total", reason="no_tokens") == 1


async def test_unknown_models_get_404_and_known_ones_without_a_worker_503(
    start_router: Start, start_engine: StartEngine
) -> None:
    """case 93"""
    engine = await start_engine()
    router = await start_router({"url": engine.url})
    await router.live(engine.url)

    async def ask(model: str) -> tuple[int, str]:
        body = {"model": model, "prompt": "x", "max_tokens": 1}
        async with router.session.post(f"{router.base}/v1/completions", json=body) as answer:
            return answer.status, answer.headers.get("x-kv-router-error", "")

    assert await ask("nope") == (404, "model_not_found")
    assert (await ask("tiny"))[0] == 200
    assert await router.remove(engine.url) == 200
    assert await ask("tiny") == (503, "no_worker")
    assert await models(router) == []


async def models(router: Running) -> list[str]:
    return [model["id"] for model in (await router.get(f"{router.base}/v1/models"))["data"]]


async def test_a_removed_workers_series_vanish_and_a_readded_one_starts_from_nothing(
    start_router: Start, start_engine: StartEngine
) -> None:
    """cases 32 and 98"""
    engine = await start_engine()
    router = await start_router({"url": engine.url})
    await router.live(engine.url)
    await complete(router, "/v1/completions", {"model": "tiny", "prompt": [7] * 64, "max_tokens": 1})

    async def holds() -> bool:
        return bool((await router.ranks())[0]["blocks"])

    await router.until(holds, "blocks announced")
    assert await router.remove(engine.url) == 200
    assert await router.remove(engine.url) == 404
    async with router.session.get(f"{router.admin}/metrics") as answer:
        assert engine.url not in await answer.text()
    assert await router.add(engine.url) == 201
    assert await router.add(engine.url) == 200
    assert await router.add(engine.url, model="other") == 409
    await router.live(engine.url)


async def test_rubbish_from_one_engine_costs_nobody_else_anything(
    start_router: Start, start_engine: StartEngine, fake_engine: Callable[..., Awaitable[FakeEngine]]
) -> None:
    """cases 7, 9 and 10: truncated msgpack, then a sound batch, on one stream"""
    sound, odd = await start_engine(), await fake_engine()
    router = await start_router({"url": sound.url}, {"url": odd.url})
    await router.live(sound.url)
    await odd.listened()
    for payload in (b"", b"\x93", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"not msgpack at all"):
        odd.publish_raw(payload)
    odd.publish({"type": "AllBlocksCleared"})

    async def applied() -> bool:
        return bool((await router.ranks(odd.url))[0]["last_seq"] == odd.next_seq[0] - 1)

    await router.until(applied, "the sound batch after the rubbish")
    assert (await router.ranks(odd.url))[0]["rejected"]
    assert (await router.ranks(sound.url))[0]["rejected"] == {}
    assert await router.remove(odd.url) == 200
    await complete(router, "/v1/completions", {"model": "tiny", "prompt": [7] * 64, "max_tokens": 1})


async def test_the_admin_listener_wants_its_key_and_never_shows_one(start_router: Start) -> None:
    """case 101"""
    router = await start_router(
        admin={"host": "127.0.0.1", "port": 0, "key": "admin-secret"}, worker_api_key="engine-secret"
    )
    async with router.session.get(f"{router.admin}/workers") as answer:
        assert (answer.status, answer.headers["x-kv-router-error"]) == (401, "unauthorized")
    async with router.session.get(f"{router.admin}/config", headers={"Authorization": "Bearer admin-secret"}) as answer:
        text = await answer.text()
        assert answer.status == 200
        assert "secret" not in text


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/route", b"{", 400),
        ("POST", "/route", b'{"path":"/flush_cache","body":{}}', 400),
        ("POST", "/route", b'{"path":"/v1/completions","body":[1]}', 400),
        ("POST", "/route", b'{"path":"/v1/completions","body":{"prompt":"x"}}', 503),
        ("POST", "/workers", b'{"url":"ftp://x"}', 400),
        ("POST", "/workers", b'{"uri":"http://127.0.0.1:1"}', 400),
        ("POST", "/workers", b"[" * 5000, 400),
        ("DELETE", "/workers", b"", 400),
        ("DELETE", "/workers?url=http://127.0.0.1:9", b"", 404),
        ("PUT", "/workers", b"", 405),
        ("GET", "/nothing", b"", 404),
    ],
)
async def test_bad_admin_requests_get_a_clear_error(
    method: str, path: str, body: bytes, status: int, start_router: Start
) -> None:
    router = await start_router()
    async with router.session.request(method, f"{router.admin}{path}", data=body) as answer:
        error = (await answer.json())["error"]
        assert answer.status == status
        assert error["code"] == answer.headers["x-kv-router-error"]
        assert len(error["message"]) > 10


async def test_nothing_is_left_open_when_the_router_stops(start_router: Start, start_engine: StartEngine) -> None:
    import asyncio

    before = len(asyncio.all_tasks())
    engine = await start_engine(dp_size=2)
    running = len(asyncio.all_tasks())
    router = await start_router({"url": engine.url})
    await router.live(engine.url, 2)
    await router.service.stop(0.0)
    await until(lambda: len(asyncio.all_tasks()) <= running, "the router's tasks gone")
    assert running >= before

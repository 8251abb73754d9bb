"""ext_authz over HTTP: what Envoy is told for the requests it asks about."""

from __future__ import annotations

import gc
import json

import msgspec
import pytest

from router.placement import RankPlacement
from tests.e2e.conftest import Running
from tests.envoy.conftest import Pickers, StartEngine
from tests.support.engine import stored
from tests.support.http import Answered, RawClient, fetch, get, post
from tests.support.waiting import until

PROMPT = list(range(1, 42))
KEYS = [101, 102]


async def ask(running: Running, data: bytes) -> Answered:
    assert running.service.envoy is not None
    return await fetch(running.service.envoy.ports["ext_authz"], data)


def completion(prompt: object = PROMPT, target: str = "/v1/completions", fields: str = "", **more: object) -> bytes:
    return post(target, json.dumps({"model": "tiny", "prompt": prompt, **more}).encode(), fields)


def code(answer: Answered) -> str:
    assert answer.one("x-kv-router-error") == json.loads(answer.body)["error"]["code"]
    return str(answer.one("x-kv-router-error"))


async def test_a_request_goes_to_the_worker_that_holds_its_prefix_and_the_others_follow(
    fake_engine: StartEngine, pickers: Pickers
) -> None:
    engines = [await fake_engine() for _ in range(3)]
    running = await pickers(*engines)
    engines[1].publish(stored(KEYS, PROMPT[:8], 4))

    async def credited() -> bool:
        return await running.credit(PROMPT, engines[1].url) == 8

    await running.until(credited, "the prefix is known")
    answer = await ask(running, completion())
    assert (answer.status, answer.body) == (200, b"")
    names = (answer.one("x-gateway-destination-endpoint") or "").split(",")
    assert names[0] == f"127.0.0.1:{engines[1].port}"
    assert sorted(names) == sorted(f"127.0.0.1:{engine.port}" for engine in engines)
    assert answer.one("x-envoy-original-dst-host") == names[0]
    assert answer.one("x-data-parallel-rank") is None
    assert await running.metric("decisions_total", reason="prefix") == 1
    assert await running.metric("predicted_cached_tokens_total") == 8
    assert await running.metric("requests_total", route="/v1/completions", outcome="ok") == 1


async def test_the_rank_is_pinned_and_only_workers_that_have_it_may_take_over(
    fake_engine: StartEngine, pickers: Pickers
) -> None:
    wide, other, narrow = await fake_engine(dp_size=2), await fake_engine(dp_size=2), await fake_engine()
    running = await pickers(wide, other, narrow)
    wide.publish(stored(KEYS, PROMPT[:8], 4), rank=1)

    async def credited() -> bool:
        return await running.credit(PROMPT, wide.url, rank=1) == 8

    await running.until(credited, "the prefix is known")
    answer = await ask(running, completion())
    assert answer.one("x-data-parallel-rank") == "1"
    assert answer.one("x-gateway-destination-endpoint") == f"127.0.0.1:{wide.port},127.0.0.1:{other.port}"


async def test_a_rank_the_client_names_is_left_to_it(fake_engine: StartEngine, pickers: Pickers) -> None:
    engine = await fake_engine(dp_size=2)
    running = await pickers(engine)
    answer = await ask(running, completion(fields="x-data-parallel-rank: 1\r\n"))
    assert (answer.status, answer.one("x-data-parallel-rank")) == (200, None)
    refused = await ask(running, completion(fields="x-data-parallel-rank: 7\r\n"))
    assert (refused.status, code(refused)) == (400, "bad_request")


async def test_the_clients_key_is_taken_off_and_the_workers_put_on(fake_engine: StartEngine, pickers: Pickers) -> None:
    """case 103"""
    engine = await fake_engine()
    running = await pickers(engine, api_keys=["client"], worker_api_key="engine")
    assert code(await ask(running, completion())) == "unauthorized"
    answer = await ask(running, completion(fields="x-api-key: client\r\n"))
    assert answer.one("authorization") == "Bearer engine"
    assert answer.one("x-envoy-auth-headers-to-remove") == "x-api-key"
    bearer = await ask(running, completion(fields="Authorization: Bearer client\r\n"))
    assert (bearer.one("authorization"), bearer.one("x-envoy-auth-headers-to-remove")) == ("Bearer engine", None)


@pytest.mark.parametrize(
    ("request_", "status", "error"),
    [
        (get("/v1/models"), 404, "not_found"),
        (get("/metrics"), 404, "not_found"),
        (post("/flush_cache"), 404, "not_found"),
        (get("/v1/completions"), 405, "method_not_allowed"),
        (post("/v1/completions", b"[]"), 400, "bad_json"),
        (completion(model="other"), 404, "model_not_found"),
        (completion(bootstrap_host="evil"), 400, "bad_request"),
    ],
)
async def test_what_the_public_listener_refuses_is_refused_here(
    request_: bytes, status: int, error: str, fake_engine: StartEngine, pickers: Pickers
) -> None:
    """cases 81, 101 and 107: what the router itself would answer must not reach an engine either"""
    running = await pickers(await fake_engine())
    answer = await ask(running, request_)
    assert (answer.status, code(answer)) == (status, error)
    assert answer.all("x-gateway-destination-endpoint") == []


async def test_without_a_ready_worker_the_error_says_so(fake_engine: StartEngine, pickers: Pickers) -> None:
    engine = await fake_engine()
    running = await pickers(engine, fleet={"probe_interval_s": 0.1, "unhealthy_after": 1})
    await engine.stop_http()
    await running.until(lambda: _down(running), "the worker is down")
    answer = await ask(running, completion())
    assert (answer.status, code(answer), answer.one("retry-after")) == (503, "no_worker", "1")


async def _down(running: Running) -> bool:
    return [worker["state"] for worker in await running.workers()] == ["unhealthy"]


async def test_one_connection_carries_many_questions(fake_engine: StartEngine, pickers: Pickers) -> None:
    engine = await fake_engine()
    running = await pickers(engine)
    assert running.service.envoy is not None
    client = await RawClient.to(running.service.envoy.ports["ext_authz"])
    for _ in range(3):
        await client.send(completion())
        assert (await client.answer()).status == 200
    client.leave()


async def test_a_worker_by_name_is_given_by_its_address(fake_engine: StartEngine, start_router: object) -> None:
    engine = await fake_engine()
    running: Running = await start_router(  # type: ignore[operator]
        {"url": f"http://localhost:{engine.port}"}, envoy={"ext_authz": {"port": 0}}
    )
    await running.live(f"http://localhost:{engine.port}")
    answer = await ask(running, completion())
    assert answer.one("x-gateway-destination-endpoint") in (f"127.0.0.1:{engine.port}", f"[::1]:{engine.port}")


async def test_a_question_is_load_until_its_first_token_was_due(fake_engine: StartEngine, pickers: Pickers) -> None:
    engine = await fake_engine()
    running = await pickers(engine, envoy={"ext_authz": {"port": 0}, "charge_limit_s": 600})
    load = running.service.fleet.workers[0].ranks[0].account
    assert (await ask(running, completion(list(range(1, 4001))))).status == 200
    assert (load.requests, load.queued_uncached_tokens) == (1, 4000)
    ahead = await running.route("/v1/completions", model="tiny", prompt=PROMPT)
    assert ahead["candidates"][0]["cost_terms_tokens"]["queue"] == 4000
    # This engine sends no reports, and nobody asks again: the charge ends by itself.
    await until(lambda: load.requests == 0, "the charge is over")
    assert load.queued_uncached_tokens == 0


async def test_an_engines_report_takes_the_place_of_what_was_sent_to_it(
    fake_engine: StartEngine, pickers: Pickers
) -> None:
    """case 57"""
    engine = await fake_engine()
    running = await pickers(engine, policy={"prefill_tokens_per_s": 1})  # nothing is due for an hour
    rank = running.service.fleet.workers[0].ranks[0]
    assert (await ask(running, completion(list(range(1, 4001))))).status == 200
    assert rank.account.queued_uncached_tokens == 4000

    def reported() -> bool:
        rank.load(msgspec.msgpack.encode(["LoadStat", 3, 1, 0, 1000, 0, 700]))
        return rank.account.requests == 0

    await until(reported, "the report has the request")
    assert (rank.account.queued_uncached_tokens, rank.account.decoding) == (0, 3)
    ahead = await running.route("/v1/completions", model="tiny", prompt=PROMPT)
    assert ahead["candidates"][0]["cost_terms_tokens"]["queue"] == 700


async def test_a_charge_does_not_keep_its_request_in_memory(fake_engine: StartEngine, pickers: Pickers) -> None:
    running = await pickers(await fake_engine(), policy={"prefill_tokens_per_s": 1})
    for _ in range(3):
        assert (await ask(running, completion())).status == 200
    assert running.service.fleet.workers[0].ranks[0].account.requests == 3
    gc.collect()
    assert [one for one in gc.get_objects() if isinstance(one, RankPlacement)] == []

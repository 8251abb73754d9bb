"""Requests through a split fleet: real router, simulated engines, real sockets (issue 9, case 62)."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from router.errors import RouterError
from router.pair_placement import prompts_in
from router.prompt.body import parse_body
from router.proxy.plan import Outcome
from tests.pairs.conftest import Engine, MakeSplit, Split
from tests.support.waiting import until

ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": list(range(10, 300)), "max_tokens": 6}),
    ("/generate", {"input_ids": list(range(20, 300)), "sampling_params": {"max_new_tokens": 6}}),
    (
        "/v1/chat/completions",
        {"model": "tiny", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 6},
    ),
]


def ids(seed: int, count: int = 200) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(10, 4000) for _ in range(count)]


def completion(seed: int = 1, count: int = 200, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": ids(seed, count), "max_tokens": 4, **more}


async def settled(made: Split) -> None:
    """Every leg has ended and nothing is in flight."""
    await until(lambda: not made.inflight() and not made.rooms()["open"], "nothing in flight, no room open")


@pytest.mark.parametrize(("path", "body"), ROUTES, ids=[path for path, _ in ROUTES])
async def test_a_request_is_served_by_a_pair_that_met_once(split: MakeSplit, path: str, body: dict[str, Any]) -> None:
    made = await split(prefill_options={"dp_size": 2})
    status, answer, fields = await made.post(path, body)
    assert status == 200, answer
    assert fields["x-kv-router-worker"] == made.prefill[0].url
    assert fields["x-kv-router-decode-worker"] == made.decode[0].url
    await settled(made)
    assert made.rooms() == {"met": 1, "failed": 0, "reused": 0, "open": 0}
    assert await made.running.metric("pairs_total", outcome="ok") == 1


async def test_a_stream_comes_from_the_decode_engine_token_by_token(split: MakeSplit) -> None:
    made = await split()
    body = completion(stream=True, stream_options={"include_usage": True})
    async with made.running.session.post(f"{made.running.base}/v1/completions", json=body) as answer:
        events = [line async for line in answer.content if line.startswith(b"data: ")]
    assert answer.status == 200
    assert events[-1].strip() == b"data: [DONE]"
    usage = json.loads(events[-2][6:])["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (200, 4)


async def test_the_second_time_the_prefix_is_credited_to_the_prefill_rank_that_has_it(split: MakeSplit) -> None:
    """The credit is the prefill side's, and so is what the engines report."""
    made = await split(prefill=2, decode=2, prefill_options={"dp_size": 2})
    _, first, where = await made.post("/v1/completions", completion())
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await settled(made)
    for _ in range(3):
        _, again, fields = await made.post("/v1/completions", completion())
        assert (fields["x-kv-router-worker"], fields["x-kv-router-rank"]) == (
            where["x-kv-router-worker"],
            where["x-kv-router-rank"],
        )
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
        assert fields["x-kv-router-cached-tokens"] == "192"
        await settled(made)
    assert await made.running.metric("reported_cached_tokens_total") == 3 * 192
    assert await made.running.metric("predicted_cached_tokens_total") == 3 * 192
    assert await made.running.metric("reported_prompt_tokens_total") == 4 * 200


async def test_route_explains_both_halves_and_changes_nothing(split: MakeSplit) -> None:
    made = await split(prefill=2, decode=3)
    decision = await made.running.route("/v1/completions", **completion())
    assert {c["worker"] for c in decision["candidates"]} == {one.url for one in made.prefill}
    assert {c["worker"] for c in decision["decode"]["candidates"]} == {one.url for one in made.decode}
    assert decision["decode"]["worker"] in {one.url for one in made.decode}
    assert made.rooms() == {"met": 0, "failed": 0, "reused": 0, "open": 0}
    assert made.inflight() == []


async def test_many_pairs_spread_over_decode_ranks_and_meet_once_each(split: MakeSplit) -> None:
    made = await split(prefill=2, decode=3, prefill_options={"dp_size": 2}, decode_options={"dp_size": 2})
    answers = await asyncio.gather(*(made.post("/v1/completions", completion(n)) for n in range(60)))
    assert [status for status, _, _ in answers] == [200] * 60
    await settled(made)
    assert made.rooms() == {"met": 60, "failed": 0, "reused": 0, "open": 0}
    used = {(f["x-kv-router-decode-worker"], f["x-kv-router-decode-rank"]) for _, _, f in answers}
    assert len(used) == 6
    assert [one.refused for one in made.engines] == [0] * 5


async def test_a_batch_of_prompts_has_a_room_for_each(split: MakeSplit) -> None:
    made = await split(prefill_options={"dp_size": 2})
    body = {"model": "tiny", "prompt": [ids(n) for n in range(4)], "max_tokens": 3}
    status, answer, _ = await made.post("/v1/completions", body)
    assert status == 200, answer
    assert len(answer["choices"]) == 4
    await settled(made)
    assert made.rooms()["met"] == 4


async def test_copies_are_refused_where_there_is_no_plain_engine(split: MakeSplit) -> None:
    """A real SGLang 0.5.23 pair never meets over them: all copies of a prompt get one room."""
    made = await split()
    status, answer, _ = await made.post("/v1/completions", completion(n=3))
    assert (status, answer["error"]["code"]) == (400, "bad_request")
    assert made.rooms() == {"met": 0, "failed": 0, "reused": 0, "open": 0}


@pytest.mark.parametrize(
    ("path", "fields", "prompts"),
    [
        ("/v1/completions", {"prompt": "one"}, 1),
        ("/v1/completions", {"prompt": ["one"]}, 1),
        ("/v1/completions", {"prompt": ["one", "two"]}, 2),
        ("/v1/completions", {"prompt": [1, 2, 3]}, 1),
        ("/v1/completions", {"prompt": [[1, 2], [3], [4]]}, 3),
        ("/generate", {"text": [" a", "b"]}, 2),
        ("/generate", {"input_ids": [[1], [2]]}, 2),
        ("/generate", {"input_ids": [1, 2]}, 1),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, 1),
        ("/v1/chat/completions", {"messages": [], "prompt": ["not", "read"]}, 1),
        ("/v1/completions", {"prompt": "one", "text": ["not", "read"]}, 1),
        ("/generate", {"text": "one", "prompt": ["not", "read"]}, 1),
    ],
)
def test_each_prompt_of_a_batch_is_counted(path: str, fields: dict[str, Any], prompts: int) -> None:
    for indent in (None, 2):
        assert prompts_in(parse_body(path, json.dumps(fields, indent=indent).encode())) == prompts


async def test_the_rank_a_client_names_is_the_prefill_sides(split: MakeSplit) -> None:
    """The decode engine has one rank: it must not be told the client's."""
    made = await split(prefill_options={"dp_size": 2})
    for rank in ("1", "0", "1"):
        status, answer, fields = await made.post("/v1/completions", completion(), **{"X-Data-Parallel-Rank": rank})
        assert status == 200, answer
        assert fields["x-kv-router-rank"] == rank
    status, answer, _ = await made.post("/generate", {"input_ids": ids(3), "routed_dp_rank": 1})
    assert status == 200, answer
    await settled(made)
    status, _, _ = await made.post("/v1/completions", completion(), **{"X-Data-Parallel-Rank": "2"})
    assert status == 400


@pytest.mark.parametrize(("prefill", "decode", "code"), [(1, 0, "no_decode_workers"), (0, 2, "no_prefill_workers")])
async def test_half_a_pool_is_said_and_gets_no_traffic(split: MakeSplit, prefill: int, decode: int, code: str) -> None:
    made = await split(prefill=prefill, decode=decode)
    for path, body in ROUTES:
        status, answer, fields = await made.post(path, body)
        assert (status, answer["error"]["code"], fields["x-kv-router-error"]) == (503, code, code)
    async with made.running.session.get(f"{made.running.base}/ready") as ready:
        assert (ready.status, ready.headers["x-kv-router-error"]) == (503, code)
    async with made.running.session.get(f"{made.running.admin}/ready") as ready:
        assert ready.status == 503
        assert code in await ready.text()
    assert [one.refused for one in made.engines] == [0] * len(made.engines)


async def test_a_route_without_a_hand_over_needs_a_plain_engine_but_tokenising_does_not(split: MakeSplit) -> None:
    made = await split()
    status, answer, _ = await made.post("/v1/embeddings", {"model": "tiny", "input": "x"})
    assert (status, answer["error"]["code"]) == (503, "no_worker")
    assert "plain" in answer["error"]["message"]
    status, answer, _ = await made.post("/v1/tokenize", {"model": "tiny", "prompt": "hello"})
    assert (status, answer["count"] > 0) == (200, True)


async def test_a_compressed_body_is_refused_where_both_legs_would_need_it_changed(split: MakeSplit) -> None:
    made = await split()
    status, answer, _ = await made.post("/v1/completions", completion(), **{"Content-Encoding": "br"})
    assert (status, answer["error"]["code"]) == (400, "bad_request")


async def test_transfer_groups_are_kept_apart(engine: Engine, start_router: Any, split: MakeSplit) -> None:
    """Workers labelled with different groups are never paired; one without a label is anybody's partner."""
    one, two = [await engine(role="decode") for _ in range(2)]
    lone = await engine(role="prefill")
    running = await start_router(
        {"url": lone.url, "group": "a"}, {"url": one.url, "group": "a"}, {"url": two.url, "group": "b"}
    )
    for each in (lone, one, two):
        await running.live(each.url)
    decision = await running.route("/v1/completions", **completion())
    assert [c["worker"] for c in decision["decode"]["candidates"]] == [one.url]
    await running.remove(one.url)
    async with running.session.post(f"{running.base}/v1/completions", json=completion()) as answer:
        assert answer.headers["x-kv-router-error"] == "no_decode_workers"


# ---- mixed fleets


async def test_short_prompts_stay_on_plain_engines_and_long_ones_are_split(engine: Engine, split: MakeSplit) -> None:
    plain = await engine()
    made = await split(workers=[{"url": plain.url}], disaggregation={"plain_below_tokens": 100, "handover_s": 0})
    _, _, short = await made.post("/v1/completions", completion(count=50))
    assert short["x-kv-router-worker"] == plain.url
    assert "x-kv-router-decode-worker" not in short
    decision = await made.running.route("/v1/completions", **completion(count=50))
    assert (decision["reason"], "decode" in decision) in {("plain_pool", False), ("load", False), ("prefix", False)}
    seen = set()
    for seed in range(30):
        _, _, long = await made.post("/v1/completions", completion(seed, count=600))
        seen.add(long["x-kv-router-worker"])
    assert seen == {plain.url, made.prefill[0].url}


async def test_a_hand_over_that_costs_more_than_it_saves_is_not_made(engine: Engine, split: MakeSplit) -> None:
    plain = await engine()
    made = await split(workers=[{"url": plain.url}], disaggregation={"plain_below_tokens": 0, "handover_s": 60})
    for seed in range(5):
        _, _, fields = await made.post("/v1/completions", completion(seed, count=600))
        assert fields["x-kv-router-worker"] == plain.url
    assert made.rooms()["met"] == 0


async def test_copies_and_embeddings_go_to_the_plain_engine_of_a_mixed_fleet(engine: Engine, split: MakeSplit) -> None:
    plain = await engine()
    made = await split(workers=[{"url": plain.url}], disaggregation={"plain_below_tokens": 0, "handover_s": 0})
    for seed in range(6):
        status, _, fields = await made.post("/v1/completions", completion(seed, count=600, n=2))
        assert (status, fields["x-kv-router-worker"]) == (200, plain.url)


async def test_a_mixed_fleet_with_half_a_split_pool_serves_on_its_plain_engines(
    engine: Engine, split: MakeSplit
) -> None:
    plain = await engine()
    made = await split(decode=0, workers=[{"url": plain.url}])
    status, _, fields = await made.post("/v1/completions", completion(count=600))
    assert (status, fields["x-kv-router-worker"]) == (200, plain.url)


async def test_who_cannot_send_pairs_is_given_plain_engines_only(engine: Engine, split: MakeSplit) -> None:
    """Envoy's endpoint picker names one engine for each request."""
    made = await split()
    core = made.running.service.core
    body = json.dumps(completion(count=600)).encode()
    plan = await core.plan("/v1/completions", {}, body, "id-1")
    with pytest.raises(RouterError, match="no worker"):
        core.place_whole(plan, frozenset())
    plain = await engine()
    await made.running.add(plain.url)
    await made.running.live(plain.url)
    placement = core.place_whole(await core.plan("/v1/completions", {}, body, "id-2"), frozenset())
    assert placement.url.text == plain.url
    placement.finish(Outcome.CLIENT_CLOSED)
    assert made.inflight() == []


async def test_pools_are_kept_by_model(engine: Engine, split: MakeSplit) -> None:
    plain = await engine(model="other")
    made = await split(workers=[{"url": plain.url}])
    _, _, fields = await made.post("/v1/completions", completion(count=600, model="other"))
    assert fields["x-kv-router-worker"] == plain.url
    _, _, fields = await made.post("/v1/completions", completion(count=600))
    assert fields["x-kv-router-worker"] == made.prefill[0].url


# ---- vLLM


VLLM = {"vllm_config": "model='/models/tiny', served_model_name=tiny", "version": "0.32.0"}


async def test_a_vllm_pair_hands_over_what_its_prefill_engine_answered(start_router: Any, fake_engine: Any) -> None:
    """vLLM says no role: it is configured. The prefill leg goes first, for one token."""
    prefill, decode = await fake_engine(), await fake_engine()
    for one in (prefill, decode):
        one.info.clear()
        one.info.update(VLLM)
        one.bodies["/v1/models"] = b'{"data":[{"id":"tiny","root":"/models/tiny"}]}'
    prefill.bodies["/v1/completions"] = (
        b'{"choices":[],"kv_transfer_params":{"remote_block_ids":[[7]],"remote_port":5}}'
    )
    decode.bodies["/v1/completions"] = b'{"choices":[{"text":"hi"}]}'
    running = await start_router(
        {"url": prefill.url, "role": "prefill"},
        {"url": decode.url, "role": "decode"},
        fleet={"load_poll_s": 0, "probe_interval_s": 0.3, "info_interval_s": 0.5},
    )

    async def up() -> bool:
        return [w["state"] for w in await running.workers()] == ["ready", "ready"]

    await running.until(up, "both ready")
    assert [w["role"] for w in await running.workers()] == ["prefill", "decode"]
    async with running.session.post(f"{running.base}/v1/completions", json=completion()) as answer:
        assert (answer.status, await answer.json()) == (200, {"choices": [{"text": "hi"}]})
        assert answer.headers["x-kv-router-worker"] == prefill.url
        assert answer.headers["x-kv-router-decode-worker"] == decode.url
    asked = [path for path, _ in prefill.requests if path == "/v1/completions"]
    assert len(asked) == 1
    async with running.session.post(f"{running.base}/v1/messages", json=completion()) as answer:
        assert answer.headers["x-kv-router-error"] == "no_worker", "vLLM takes kv_transfer_params on two routes only"

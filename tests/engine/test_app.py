"""The engine's HTTP routes, over real sockets, and what they make the event streams say."""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
from typing import Any

import aiohttp
import msgspec
import pytest

from router.contract.descriptor import parse_descriptor
from router.contract.server_info import parse_server_info
from router.contract.url import WorkerUrl
from router.engine.wire import PageHasher
from router.hashing import Namespace, creditable_blocks, pack_ids
from tests.engine.support import TIMEOUT_S, Starter, Wire
from tests.support.waiting import until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Which block comes first? " * 12}]}
LONG = {"input_ids": [9] * 32, "sampling_params": {"max_new_tokens": 100_000}}


async def post(http: aiohttp.ClientSession, url: str, body: Any, **headers: str) -> Any:
    async with http.post(url, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def stream(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[Any]:
    """Every `data:` value; the last must be [DONE]."""
    async with http.post(url, json={**body, "stream": True}) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        records = (await response.read()).split(b"\n\n")
    assert records[-2:] == [b"data: [DONE]", b""]
    return [json.loads(record.removeprefix(b"data: ")) for record in records[:-2]]


async def test_server_info_is_what_the_router_reads(start: Starter, http: aiohttp.ClientSession) -> None:
    engine = await start(page_size=16, dcp_size=4, dp_size=2, tokens=6400, eagle=True, topic="t")
    for path in ("/server_info", "/get_server_info"):
        async with http.get(engine.url + path) as response:
            info = parse_server_info(await response.read())
        assert (info.engine, info.version, info.model_names, info.role) == ("sglang", "0.5.23", ("tiny",), "plain")
        assert (info.page_size, info.dcp_size, info.dp_size, info.max_total_tokens) == (16, 4, 2, 6400)
        assert (info.bigram, info.cache_report, info.context_length) == (True, True, 131072)
        assert info.startup_fingerprint
    descriptor = parse_descriptor(info.kv_events, WorkerUrl.parse(engine.url))
    assert (descriptor.block_size, descriptor.dp_size, descriptor.topic) == (64, 2, "t")
    kv = engine.ports.kv
    assert kv is not None
    assert [rank.events for rank in descriptor.ranks] == [f"tcp://127.0.0.1:{kv}", f"tcp://127.0.0.1:{kv + 1}"]
    assert all(rank.replay and rank.load and not rank.problem for rank in descriptor.ranks)


async def test_without_event_ports_there_is_no_descriptor(start: Starter, http: aiohttp.ClientSession) -> None:
    engine = await start(kv_port=None, replay_port=None, load_port=None)
    async with http.get(f"{engine.url}/server_info") as response:
        assert (await response.json())["kv_events"] is None
    assert (await post(http, f"{engine.url}/v1/completions", {"prompt": [1], "max_tokens": 1}))["usage"]


async def test_two_engines_of_one_process_share_nothing(start: Starter, http: aiohttp.ClientSession) -> None:
    one, two = await start(), await start()
    body = {**CHAT, "max_tokens": 1}
    await post(http, f"{one.url}/v1/chat/completions", body)
    for engine, cached in ((one, True), (two, False)):
        answer = await post(http, f"{engine.url}/v1/chat/completions", body)
        assert bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"]) is cached
    infos = []
    for engine in (one, two):
        async with http.get(f"{engine.url}/server_info") as response:
            infos.append(parse_server_info(await response.read()).startup_fingerprint)
    assert infos[0] != infos[1]


async def test_a_chat_answer_has_sglangs_shape(start: Starter, http: aiohttp.ClientSession) -> None:
    engine = await start()
    answer = await post(http, f"{engine.url}/v1/chat/completions", {**CHAT, "max_tokens": 5, "rid": "mine"})
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage", "metadata"]
    assert (answer["id"], answer["object"], answer["model"]) == ("mine", "chat.completion", "tiny")
    (choice,) = answer["choices"]
    assert list(choice) == ["index", "message", "logprobs", "finish_reason", "matched_stop"]
    assert (choice["finish_reason"], choice["message"]["role"]) == ("length", "assistant")
    assert len(choice["message"]["content"].split()) == 5
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


async def test_a_chat_stream_has_a_role_then_texts_then_the_reason_and_usage_only_when_asked(
    start: Starter, http: aiohttp.ClientSession
) -> None:
    engine = await start()
    whole = await post(http, f"{engine.url}/v1/chat/completions", {**CHAT, "max_tokens": 6})
    chunks = await stream(http, f"{engine.url}/v1/chat/completions", {**CHAT, "max_tokens": 6})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"reasoning_content": None, "role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert all("usage" not in chunk for chunk in chunks)
    asked = {**CHAT, "max_tokens": 6, "stream_options": {"include_usage": True}}
    total = (await stream(http, f"{engine.url}/v1/chat/completions", asked))[-1]
    assert (total["choices"], total["usage"]["completion_tokens"]) == ([], 6)
    assert total["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_generate_stream_repeats_the_text_so_far(start: Starter, http: aiohttp.ClientSession) -> None:
    engine = await start(dp_size=2)
    body = {"input_ids": [3] * 20, "sampling_params": {"max_new_tokens": 4}, "routed_dp_rank": 1}
    items = await stream(http, f"{engine.url}/generate", body)
    assert all(later["text"].startswith(earlier["text"]) for earlier, later in itertools.pairwise(items))
    meta = items[-1]["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["dp_rank"]) == (20, 4, 1)
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert len(items[-1]["output_ids"]) == 4


async def test_batches_and_copies_answer_in_order(start: Starter, http: aiohttp.ClientSession) -> None:
    engine = await start(dp_size=2)
    body = {"input_ids": [[1] * 5, [2] * 7], "sampling_params": {"max_new_tokens": 1}}
    items = await post(http, f"{engine.url}/generate", body)
    assert [item["meta_info"]["prompt_tokens"] for item in items] == [5, 7]
    answer = await post(http, f"{engine.url}/v1/completions", {"prompt": [[1] * 5, [2] * 7], "n": 2, "max_tokens": 1})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 12
    chunks = await stream(http, f"{engine.url}/v1/chat/completions", {**CHAT, "n": 2, "max_tokens": 2})
    for index in (0, 1):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert (own[0]["delta"].get("role"), own[-1]["finish_reason"]) == ("assistant", "length")


async def test_tokenize_gives_the_ids_that_chat_uses(start: Starter, http: aiohttp.ClientSession) -> None:
    engine = await start()
    tokens = await post(http, f"{engine.url}/v1/tokenize", CHAT)
    chat = await post(http, f"{engine.url}/v1/chat/completions", {**CHAT, "max_tokens": 1})
    assert tokens["count"] == len(tokens["tokens"]) == chat["usage"]["prompt_tokens"]
    given = {**CHAT, "input_ids": tokens["tokens"], "max_tokens": 1}
    again = await post(http, f"{engine.url}/v1/chat/completions", given)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (tokens["count"] - 1) // 16 * 16
    both = await post(http, f"{engine.url}/v1/tokenize", {"prompt": ["a", "b c"]})
    assert both["count"] == [len(ids) for ids in both["tokens"]]


@pytest.mark.parametrize("settings", [{}, {"eagle": True}, {"page_size": 4, "dcp_size": 2}, {"tokens": 2400}])
async def test_reported_cached_tokens_are_what_the_events_promised(
    start: Starter, http: aiohttp.ClientSession, wire: Wire, settings: dict[str, Any]
) -> None:
    """Engine contract, section 2: longest resident chain, capped; here over growing and forked conversations."""
    engine = await start(**settings)
    hasher = PageHasher(engine.options.block_tokens, bigram=engine.options.eagle)
    shared = list(range(100, 164))
    talks = [shared + [talk] * 30 for talk in range(1, 6)]
    for turn in range(15):
        talk = talks[turn * 3 % 5]
        resident: set[int] = set()
        for event in await wire.events(engine.ports.replay):
            if event["type"] == "BlockStored":
                resident.update(event["block_hashes"])
            else:
                resident.difference_update(event.get("block_hashes", []))
        keys = hasher.keys(pack_ids(talk), Namespace())[: creditable_blocks(hasher.scheme, len(talk))]
        depth = next((i for i, key in enumerate(keys) if key not in resident), len(keys))
        body = {"input_ids": talk, "sampling_params": {"max_new_tokens": 40}}
        item = await post(http, f"{engine.url}/generate", body)
        assert item["meta_info"]["cached_tokens"] == depth * hasher.scheme.width
        talk += item["output_ids"] + [7] * 20


async def test_an_unpinned_request_goes_round_the_ranks_and_a_pinned_one_to_its_own(
    start: Starter, http: aiohttp.ClientSession, wire: Wire
) -> None:
    engine = await start(dp_size=3)
    body = {"input_ids": [4] * 20, "sampling_params": {"max_new_tokens": 1}}
    served = [(await post(http, f"{engine.url}/generate", body))["meta_info"]["dp_rank"] for _ in range(4)]
    assert served == [0, 1, 2, 0]
    await post(
        http, f"{engine.url}/v1/completions", {"prompt": [6] * 40, "max_tokens": 1}, **{"X-Data-Parallel-Rank": "2"}
    )
    assert engine.ports.replay is not None
    stored = [
        sum(len(event.get("block_hashes", [])) for event in await wire.events(engine.ports.replay + rank))
        for rank in range(3)
    ]
    assert stored == [1, 1, 3]


async def test_flush_clears_every_rank_and_is_refused_while_a_request_runs(
    start: Starter, http: aiohttp.ClientSession, wire: Wire
) -> None:
    engine = await start(dp_size=2, time_scale=1.0)
    running = asyncio.create_task(http.post(f"{engine.url}/generate", json={**LONG, "stream": True}))
    response = await asyncio.wait_for(running, TIMEOUT_S)
    async with http.post(f"{engine.url}/flush_cache") as refused:
        assert (refused.status, await refused.text()) == (400, "Flush cache failed.\n")
    response.close()

    async def flushed() -> bool:
        async with http.post(f"{engine.url}/flush_cache") as answer:
            return answer.status == 200

    await until(flushed, "the client went away, so its request is aborted and the cache can be flushed")
    assert engine.ports.replay is not None
    for rank in range(2):
        events = await wire.events(engine.ports.replay + rank)
        assert [event["type"] for event in events if event["type"] == "AllBlocksCleared"] == ["AllBlocksCleared"] * 2
        assert events[-1]["type"] == "AllBlocksCleared"


async def test_abort_request_matches_rids_by_prefix(start: Starter, http: aiohttp.ClientSession) -> None:
    engine = await start(time_scale=1.0)

    def begin(rid: str) -> asyncio.Task[Any]:
        return asyncio.create_task(post(http, f"{engine.url}/generate", {**LONG, "rid": rid}))

    first, second, other = begin("job-1"), begin("job-2"), begin("else")
    await until(lambda: len(engine.ranks[0].scheduler.running) == 3, "three requests run")
    for rid in ("", "nobody", "job-"):
        async with http.post(f"{engine.url}/abort_request", json={"rid": rid}) as response:
            assert response.status == 200
    for job in (first, second):
        assert (await asyncio.wait_for(job, TIMEOUT_S))["meta_info"]["finish_reason"]["type"] == "abort"
    assert not other.done()
    async with http.post(f"{engine.url}/abort_request", json={"abort_all": True}):
        pass
    assert (await asyncio.wait_for(other, TIMEOUT_S))["meta_info"]["finish_reason"]["type"] == "abort"


async def test_draining_fails_the_health_check_at_once_and_lets_streams_finish(
    start: Starter, http: aiohttp.ClientSession
) -> None:
    engine = await start(time_scale=1.0)
    async with http.get(f"{engine.url}/health") as response:
        assert response.status == 200
    body = {"input_ids": [9] * 32, "sampling_params": {"max_new_tokens": 20}, "stream": True}
    async with http.post(f"{engine.url}/generate", json=body) as running:
        draining = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        async with http.get(f"{engine.url}/health") as response:
            assert response.status == 503
        assert not draining.done()
        assert (await running.read()).endswith(b"data: [DONE]\n\n")
    await asyncio.wait_for(draining, TIMEOUT_S)


@pytest.mark.parametrize(
    ("path", "body", "status", "answer"),
    [
        (
            "/v1/completions",
            {"prompt": [1], "routed_dp_rank": 7},
            400,
            b'"message":"routed_dp_rank=7 out of range [0, 1)"',
        ),
        ("/generate", {"text": "a", "routed_dp_rank": 7}, 400, b'{"error":{"message":"routed_dp_rank=7 out of range'),
        ("/v1/chat/completions", [1, 2], 500, b"Internal Server Error"),
        ("/v1/chat/completions", {"messages": [{"role": "alien", "content": "x"}]}, 400, b'"object":"error"'),
        ("/v1/completions", {"prompt": [1] * 40, "max_tokens": 900}, 400, b"one rank holds 800"),
        ("/nope", {}, 404, b'{"detail":"Not Found"}'),
        ("/health", {}, 405, b'{"detail":"Method Not Allowed"}'),
    ],
)
async def test_errors_have_the_routes_own_shape(
    start: Starter, http: aiohttp.ClientSession, path: str, body: Any, status: int, answer: bytes
) -> None:
    """Engine contract, section 5."""
    engine = await start(tokens=800)
    async with http.post(engine.url + path, json=body) as response:
        assert response.status == status
        assert answer in await response.read()


async def test_salted_prompts_are_apart_and_say_so_on_the_wire(
    start: Starter, http: aiohttp.ClientSession, wire: Wire
) -> None:
    """Case 40: the salt is in the hash and in the event; extra_key separates the cache but shares the hash."""
    engine = await start()
    body = {"input_ids": [8] * 33, "sampling_params": {"max_new_tokens": 1}}
    for extra in ({}, {"cache_salt": "s"}, {"extra_key": "k"}):
        item = await post(http, f"{engine.url}/generate", {**body, **extra})
        assert item["meta_info"]["cached_tokens"] == 0
    plain, salted, keyed = [e for e in await wire.events(engine.ports.replay) if e["type"] == "BlockStored"]
    assert plain["block_hashes"] == keyed["block_hashes"] != salted["block_hashes"]
    assert salted["cache_salt"] == "s"
    assert "cache_salt" not in plain


async def test_prompt_pages_are_on_the_wire_before_the_answer_is_complete(
    start: Starter, http: aiohttp.ClientSession, wire: Wire
) -> None:
    engine = await start(time_scale=1.0)
    async with http.post(f"{engine.url}/generate", json={**LONG, "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        events = await wire.events(engine.ports.replay)
        assert [len(event["block_hashes"]) for event in events if event["type"] == "BlockStored"] == [2]
        response.close()


async def test_batches_carry_the_rank_and_a_time(start: Starter, wire: Wire) -> None:
    engine = await start()
    ((_, seq, payload), _) = await wire.replay(engine.ports.replay)
    ts_s, _, rank = msgspec.msgpack.decode(payload)
    assert (struct.unpack(">Q", seq), rank) == ((0,), 0)
    assert isinstance(ts_s, float)

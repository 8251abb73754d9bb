"""Simulated prefill and decode engines: they check what they are sent, meet once, and tell what they hold."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from router.engine.app import SimulatedEngine
from router.engine.body import BadRequest
from router.engine.handover import read_meetings
from router.engine.options import TINY_MODEL, EngineOptions
from router.engine.rooms import Handed, RoomRefused, Rooms
from router.engine.text import TextCodec
from router.engine.timing import TimingProfile

FAST = TimingProfile(prefill_tokens_per_s=1e6, decode_step_s=0.001, step_overhead_s=0.0005)
PROMPT = list(range(10, 200))
Make = Callable[..., Awaitable[SimulatedEngine]]


@pytest.fixture(scope="module")
def codec() -> TextCodec:
    return TextCodec(TINY_MODEL)


@pytest.fixture
async def make(codec: TextCodec) -> AsyncIterator[Make]:
    made: list[SimulatedEngine] = []

    async def start(role: str, **options: Any) -> SimulatedEngine:
        engine = SimulatedEngine(EngineOptions(port=0, role=role, timing=FAST, **options), codec=codec)
        await engine.start()
        made.append(engine)
        return engine

    yield start
    for engine in made:
        await engine.stop()


async def post(engine: SimulatedEngine, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/v1/completions", data=json.dumps(body).encode()) as answer,
    ):
        return answer.status, await answer.json(content_type=None)


def body(prefill: SimulatedEngine, room: Any = 11, **more: Any) -> dict[str, Any]:
    assert prefill.bootstrap is not None
    place = {"bootstrap_host": "127.0.0.1", "bootstrap_port": prefill.bootstrap.port, "bootstrap_room": room}
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, **place, **more}


async def both(prefill: SimulatedEngine, decode: SimulatedEngine, **fields: Any) -> list[tuple[int, dict[str, Any]]]:
    sent = body(prefill, **fields)
    return list(await asyncio.gather(post(prefill, sent), post(decode, {**sent, "routed_dp_rank": None})))


async def test_a_pair_meets_the_prefill_side_says_one_token_and_the_decode_side_answers(make: Make) -> None:
    prefill, decode = await make("prefill"), await make("decode")
    (status, first), (other, second) = await both(prefill, decode)
    assert (status, other) == (200, 200)
    assert (first["usage"]["completion_tokens"], second["usage"]["completion_tokens"]) == (1, 3)
    assert second["choices"][0]["text"].startswith(first["choices"][0]["text"])
    assert prefill.ranks[0].scheduler.cache.tree_pages == 190 // 16
    assert decode.ranks[0].scheduler.cache.tree_pages == 0, "no radix cache: nothing outlives its request"


async def test_a_decode_engine_with_a_radix_cache_keeps_the_blocks_and_reports_the_prefill_sides_hits(
    make: Make,
) -> None:
    prefill, decode = await make("prefill"), await make("decode", decode_radix_cache=True)
    await both(prefill, decode, room=1)
    assert decode.ranks[0].scheduler.cache.tree_pages == 192 // 16
    _, (_, answer) = await both(prefill, decode, room=2)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 176


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_plain_traffic_is_refused_and_counted(make: Make, role: str) -> None:
    engine = await make(role)
    status, answer = await post(engine, {"model": "tiny", "prompt": PROMPT})
    assert (status, "send to the router" in answer["message"]) == (400, True)
    assert engine.refused == 1


async def test_a_room_is_for_one_meeting(make: Make) -> None:
    """Case 62."""
    prefill, decode = await make("prefill"), await make("decode")
    await both(prefill, decode)
    status, answer = await post(prefill, body(prefill))
    assert (status, "used before" in answer["message"]) == (400, True)
    assert prefill.bootstrap is not None
    assert prefill.bootstrap.rooms.counts.reused == 1


async def test_a_pinned_rank_that_the_room_does_not_imply_must_be_named_to_both_sides(make: Make) -> None:
    """SGLang 0.5.23: follow_bootstrap_room conflict."""
    prefill, decode = await make("prefill", dp_size=2), await make("decode")
    sent = body(prefill, room=4, routed_dp_rank=1)
    status, answer = await post(prefill, sent)
    assert (status, "follow_bootstrap_room conflict" in answer["message"]) == (500, True)
    named = {**body(prefill, room=6), "disagg_prefill_dp_rank": 1}
    answers = await asyncio.gather(post(prefill, {**named, "routed_dp_rank": 1}), post(decode, named))
    assert [status for status, _ in answers] == [200, 200]


async def test_sides_that_expect_another_rank_or_prompt_fail_instead_of_decoding_it(make: Make) -> None:
    prefill, decode = await make("prefill", dp_size=2), await make("decode")
    named = {**body(prefill, room=6), "disagg_prefill_dp_rank": 1}
    wrong = {**body(prefill, room=6), "disagg_prefill_dp_rank": 0}
    answers = await asyncio.gather(post(prefill, {**named, "routed_dp_rank": 1}), post(decode, wrong))
    assert [status for status, _ in answers] == [500, 500]
    other = {**body(prefill, room=8), "prompt": PROMPT[:-1]}
    answers = await asyncio.gather(post(prefill, body(prefill, room=8)), post(decode, other))
    assert [status for status, _ in answers] == [500, 500]
    assert "prompts differ" in answers[1][1]["message"]


async def test_a_scripted_transfer_failure_ends_both_sides(make: Make) -> None:
    prefill, decode = await make("prefill", transfer_fault="fails"), await make("decode")
    answers = await both(prefill, decode)
    assert [status for status, _ in answers] == [500, 500]


async def test_a_room_nobody_joins_times_out(make: Make) -> None:
    prefill = await make("prefill", bootstrap_timeout_s=0.2)
    status, answer = await post(prefill, body(prefill))
    assert (status, "no decode engine came" in answer["message"]) == (500, True)


async def test_a_decode_engine_says_so_when_its_prefill_engine_is_gone(make: Make) -> None:
    prefill, decode = await make("prefill"), await make("decode")
    sent = body(prefill)
    await prefill.stop()
    status, answer = await post(decode, sent)
    assert (status, "is gone" in answer["message"]) == (500, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"bootstrap_room": 0},
        {"bootstrap_room": 2**63},
        {"bootstrap_room": "7"},
        {"bootstrap_room": [1, 2, 3]},
        {"bootstrap_host": None},
        {"bootstrap_port": None},
        {"disagg_prefill_dp_rank": "0"},
    ],
)
def test_fields_that_name_no_place_to_meet_are_refused(fields: dict[str, Any]) -> None:
    good = {"bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 7}
    assert [m.room for m in read_meetings(good, 2)] == [7, 8]
    assert [m.room for m in read_meetings({**good, "bootstrap_room": [9, 4]}, 2)] == [9, 4]
    with pytest.raises(BadRequest):
        read_meetings({**good, **fields}, 2)


async def test_rooms_count_what_met_and_what_failed() -> None:
    rooms = Rooms()
    room = rooms.enter(1, "prefill")
    assert rooms.enter(1, "decode") is room
    room.handed.set_result(Handed(0))
    rooms.leave(room, "decode")
    assert len(rooms) == 1
    rooms.leave(room, "prefill")
    lonely = rooms.enter(2, "decode")
    rooms.leave(lonely, "decode")
    with pytest.raises(RoomRefused):
        rooms.enter(2, "decode")
    assert (rooms.counts.met, rooms.counts.failed, rooms.counts.reused, len(rooms)) == (1, 1, 1, 0)

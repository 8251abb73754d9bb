"""Pairs that fail: one clear error, both legs ended, everything given back, the right engine blamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from router.engine.timing import TimingProfile
from tests.pairs.conftest import Engine, MakeSplit, Split
from tests.pairs.test_split_fleet import completion, settled
from tests.support.waiting import until

SLOW_DECODE = TimingProfile(prefill_tokens_per_s=100_000.0, decode_step_s=0.05)
SLOW_PREFILL = TimingProfile(prefill_tokens_per_s=400.0, decode_step_s=0.001)


async def gone(made: Split) -> None:
    """No trace is left of any request: load, rooms, legs, connections in use."""
    await settled(made)
    service = made.running.service
    await until(lambda: made.legs == 0, "every prefill leg ended")
    await until(lambda: service.listener.in_flight == 0, "no request in flight")
    upstream = service._upstream
    await until(lambda: upstream.open_connections == upstream.idle_connections, "no connection in use")
    await until(lambda: all(rank.idle for one in made.engines for rank in one.ranks), "every engine idle")


async def test_a_transfer_that_fails_is_an_error_of_both_legs_and_the_next_request_is_well(split: MakeSplit) -> None:
    made = await split(prefill_options={"transfer_fault": "fails"})
    status, answer, _ = await made.post("/v1/completions", completion())
    assert status == 500
    assert "transfer failed" in str(answer)
    await gone(made)
    assert made.rooms() == {"met": 0, "failed": 1, "reused": 0, "open": 0}
    assert made.prefill[0].bootstrap is not None
    made.prefill[0].bootstrap.rooms.fault = lambda room: ""
    status, _, _ = await made.post("/v1/completions", completion())
    assert status == 200


async def test_a_pair_that_never_meets_times_out_with_its_own_code(split: MakeSplit) -> None:
    made = await split(prefill_options={"transfer_fault": "never"}, disaggregation={"meet_s": 0.5})
    status, answer, fields = await made.post("/v1/completions", completion())
    assert (status, answer["error"]["code"], fields["x-kv-router-error"]) == (504, "pair_timeout", "pair_timeout")
    assert await made.running.metric("pairs_total", outcome="not_met") == 1
    await gone(made)
    states = [w["state"] for w in await made.running.workers()]
    assert states == ["ready", "ready"], "which of the two is at fault cannot be told"


@pytest.mark.parametrize("half", ["prefill", "decode"])
async def test_an_engine_that_refuses_connections_costs_another_pair_and_another_room(
    split: MakeSplit, half: str
) -> None:
    """Case 60 and 62: the other half of the failed try is cut, its room is never used again."""
    made = await split(prefill=2, decode=2, fleet={"probe_interval_s": 60, "info_interval_s": 60})
    dead = (made.prefill if half == "prefill" else made.decode)[0]
    assert dead._runner is not None
    await dead._runner.cleanup()
    answers = [await made.post("/v1/completions", completion(n)) for n in range(8)]
    assert [status for status, _, _ in answers] == [200] * 8
    used = {fields["x-kv-router-worker"] for _, _, fields in answers}
    used |= {fields["x-kv-router-decode-worker"] for _, _, fields in answers}
    assert dead.url not in used
    await gone(made)
    rooms = made.rooms()
    assert (rooms["met"], rooms["reused"]) == (8, 0)
    blamed = [w for w in await made.running.workers() if w["state"] != "ready"]
    assert [w["url"] for w in blamed] in ([], [dead.url])


async def test_a_decode_engine_that_dies_while_it_streams_ends_the_stream_and_is_blamed(split: MakeSplit) -> None:
    made = await split(decode_options={"timing": SLOW_DECODE})
    body = completion(stream=True, max_tokens=200)
    async with made.running.session.post(f"{made.running.base}/v1/completions", json=body) as answer:
        assert answer.status == 200
        await answer.content.readline()
        await made.decode[0].stop()
        with pytest.raises((asyncio.IncompleteReadError, Exception), match=r"."):
            await _to_the_end(answer)
    await until(lambda: not made.inflight(), "nothing in flight")
    assert await made.running.metric("pairs_total", outcome="decode_failed") == 1


async def _to_the_end(answer: Any) -> None:
    done = False
    async for line in answer.content:
        done |= b"[DONE]" in line
    assert done, "cut without a mark"


async def test_a_prefill_engine_that_dies_before_the_hand_over_is_told_at_once_and_blamed(split: MakeSplit) -> None:
    made = await split(prefill_options={"timing": SLOW_PREFILL})
    asking = asyncio.create_task(made.post("/v1/completions", completion(count=2000)))
    await until(lambda: made.prefill[0].ranks[0].scheduler.running, "the prefill runs")
    await made.prefill[0].stop()
    status, answer, _ = await asyncio.wait_for(asking, 5)
    assert status in (500, 502), answer
    await until(lambda: not made.inflight(), "nothing in flight")


async def test_a_request_both_engines_refuse_is_answered_with_the_engines_own_words(split: MakeSplit) -> None:
    made = await split()
    status, answer, fields = await made.post("/v1/completions", completion(max_tokens=10_000_000))
    assert (status, answer["object"]) == (400, "error")
    assert "x-kv-router-error" not in fields
    await gone(made)


async def test_the_prefill_leg_outlives_a_client_that_leaves_until_it_ends_by_itself(split: MakeSplit) -> None:
    made = await split(prefill_options={"transfer_fault": "never", "bootstrap_timeout_s": 1.0})
    asking = asyncio.create_task(made.post("/v1/completions", completion(count=400)))
    await until(lambda: made.rooms()["open"] == 1, "the prefill engine waits in its room")
    asking.cancel()
    await until(lambda: made.running.service.listener.in_flight == 0, "the client is gone")
    assert made.legs == 1
    assert made.inflight() == [(1, 400)], "the prefill rank still carries it"
    await gone(made)
    assert await made.running.metric("pairs_total", outcome="client_closed") == 1


async def test_a_prefill_leg_left_alone_is_cut_after_its_time(split: MakeSplit) -> None:
    """Here the decode side is lost and the prefill engine does not notice: it waits for a room nobody will join."""
    made = await split(prefill_options={"transfer_fault": "never"}, disaggregation={"linger_s": 0.4})
    asking = asyncio.create_task(made.post("/v1/completions", completion()))
    await until(lambda: made.rooms()["open"] == 1, "the prefill engine waits in its room")
    asking.cancel()
    await until(lambda: made.running.service.listener.in_flight == 0, "the client is gone")
    assert made.legs == 1
    await gone(made)
    assert made.rooms()["failed"] == 1


async def test_load_is_on_the_prefill_rank_until_the_first_byte_and_on_the_decode_rank_to_the_last(
    split: MakeSplit,
) -> None:
    """Case 54, 55: uncached tokens queue on the prefill side only."""
    made = await split(prefill_options={"timing": SLOW_PREFILL}, decode_options={"timing": SLOW_DECODE})
    workers = {w.url.text: w for w in made.running.service.fleet.workers}
    computing = workers[made.prefill[0].url].ranks[0].account
    decoding = workers[made.decode[0].url].ranks[0].account
    body = completion(count=400, stream=True, max_tokens=40)
    asking = asyncio.create_task(made.running.session.post(f"{made.running.base}/v1/completions", json=body))
    await until(lambda: computing.requests, "placed")
    assert (computing.queued_uncached_tokens, decoding.queued_uncached_tokens) == (400, 0)
    assert (decoding.requests, decoding.tokens, decoding.decoding) == (1, 400, 1)
    answer = await asking
    await answer.content.readline()
    await until(lambda: computing.requests == 0, "the prefill leg is over")
    assert (computing.queued_uncached_tokens, computing.tokens) == (0, 0)
    assert (decoding.requests, decoding.tokens) == (1, 400)
    await answer.read()
    await gone(made)


async def test_overload_of_one_half_is_retried_once_and_else_passed_on(split: MakeSplit) -> None:
    """Case 89: a 503 of the prefill engine is no fault; its answer is kept in case no other pair can serve."""
    made = await split()
    prefill = made.prefill[0]

    async def busy(request: web.Request) -> web.Response:
        return web.json_response({"object": "error", "message": "busy"}, status=503, headers={"Retry-After": "7"})

    assert prefill._runner is not None
    await prefill._runner.cleanup()
    app = web.Application()
    app.router.add_get("/health", prefill._health)
    app.router.add_get("/server_info", prefill._server_info)
    app.router.add_post("/v1/completions", busy)
    again = web.AppRunner(app)
    await again.setup()
    try:
        await web.TCPSite(again, "127.0.0.1", int(prefill.url.rsplit(":", 1)[1])).start()
        status, answer, fields = await made.post("/v1/completions", completion())
        assert (status, answer["message"], fields["retry-after"]) == (503, "busy", "7")
        await until(lambda: not made.inflight(), "nothing in flight")
        (placed,) = made.running.service.core._requests.recent()
        assert placed.record is not None
        assert placed.record.worker == prefill.url
    finally:
        await again.cleanup()


async def test_limits_of_requests_in_flight_hold_for_both_halves(engine: Engine, split: MakeSplit) -> None:
    made = await split(
        prefill_options={"timing": SLOW_PREFILL}, admission={"max_inflight_per_worker": 2, "max_waiting": 50}
    )
    answers = asyncio.gather(*(made.post("/v1/completions", completion(n, count=100)) for n in range(8)))
    workers = made.running.service.fleet.workers
    most = 0
    while not answers.done():
        most = max(most, *(worker.inflight_requests for worker in workers))
        await asyncio.sleep(0.005)
    assert [status for status, _, _ in await answers] == [200] * 8
    assert most == 2
    await gone(made)


async def test_a_request_that_waits_for_a_plain_engine_holds_up_none_that_a_pair_can_serve(
    engine: Engine, split: MakeSplit
) -> None:
    """Two copies (n) cannot be handed over, and the only plain engine is at its limit."""
    plain = await engine(timing=SLOW_PREFILL)
    made = await split(
        workers=[{"url": plain.url}],
        disaggregation={"plain_below_tokens": 0, "handover_s": 0},
        admission={"max_inflight_per_worker": 1, "max_waiting": 9},
    )
    listener = made.running.service.listener
    copies = [asyncio.create_task(made.post("/v1/completions", completion(seed, count=600, n=2))) for seed in (1, 2)]
    await until(lambda: listener.waiting == 1, "one is served, the other waits")
    status, _, fields = await made.post("/v1/completions", completion(3, count=600))
    assert (status, fields["x-kv-router-worker"]) == (200, made.prefill[0].url)
    assert listener.waiting == 1, "it did not wait for its turn behind the other"
    assert [status for status, _, _ in await asyncio.gather(*copies)] == [200, 200]
    await gone(made)

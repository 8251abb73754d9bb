"""The engine behind the URL changes, with or without a word: what runs now beats what was described before."""

from __future__ import annotations

import pytest

from tests.faults.conftest import MakeScene, Scene
from tests.support.cache import Cache
from tests.support.engine import free_ports

REPLAY = pytest.mark.parametrize("replay", [0, 1000], ids=["no_replay", "replay"])


async def incarnation(at: Scene, number: int, subscription: int | None = None) -> None:
    """`subscription`: how many the publisher has then had; one an incarnation unless said otherwise."""

    async def seen() -> bool:
        worker = await at.worker()
        return bool(worker["incarnation"] == number and worker["state"] == "ready")

    await at.router.until(seen, f"incarnation {number} is ready", 15)
    await at.subscribed(number if subscription is None else subscription)


async def begin(at: Scene) -> None:
    """The engine of now has an empty cache and starts to fill it."""
    for cache in at.caches:
        cache.resident.clear()
        await at.engine.listened(cache.rank)
        cache.engine.restarted(cache.rank, 0)
        cache.clear()
        cache.store(*at.prompts[2:4])
        cache.store(at.prompts[0])
        await at.exact(cache.rank)


@REPLAY
async def test_another_page_size_in_place(replay: int, scene: MakeScene) -> None:
    at = await scene(replay=replay)
    at.engine.info["kv_events"]["block_size"] = 8
    await incarnation(at, 2)
    at.caches = [Cache(at.engine, width=8)]
    await begin(at)
    assert (await at.worker())["block_size"] == 8


async def test_decode_context_parallelism_turned_on_in_place(scene: MakeScene) -> None:
    """Page 4 × DCP 4: the descriptor's logical width is what counts."""
    at = await scene()
    at.engine.info |= {"page_size": 4, "dcp_size": 4}
    at.engine.info["kv_events"]["block_size"] = 16
    await incarnation(at, 2)
    at.caches = [Cache(at.engine, width=16)]
    await begin(at)
    assert (await at.worker())["capacity_tokens"] == 4000


async def test_ranks_that_come_and_go_in_place(scene: MakeScene) -> None:
    at = await scene(dp_size=2)
    at.engine.info["kv_events"]["dp_size"] = at.engine.info["dp_size"] = 1
    await incarnation(at, 2)
    at.caches = [Cache(at.engine, width=4)]
    await begin(at)
    assert len((await at.worker())["ranks"]) == 1
    at.engine.info["kv_events"]["dp_size"] = at.engine.info["dp_size"] = 2
    await incarnation(at, 3)
    at.caches = [Cache(at.engine, rank, width=4) for rank in range(2)]
    await begin(at)
    assert await at.router.metric("stream_state", worker=at.engine.url, state="live") == 2


@REPLAY
async def test_ports_that_move(replay: int, scene: MakeScene) -> None:
    at = await scene(replay=replay)
    at.engine.close_publisher()
    at.engine.kv_base = at.engine.info["kv_events"]["endpoint_port_base"] = free_ports(1)
    at.cache.died()
    await at.engine.open_publisher()
    await incarnation(at, 2, subscription=1)
    await begin(at)


async def test_another_topic_in_place(scene: MakeScene) -> None:
    at = await scene()
    at.engine.info["kv_events"]["topic"] = "kv-events"
    await incarnation(at, 2)
    await begin(at)


async def test_events_switched_off_and_on_again(scene: MakeScene) -> None:
    at = await scene()
    described = at.engine.info["kv_events"]
    at.engine.info["kv_events"] = None
    await at.state("off", "--kv-events-config")
    await at.serve(1)
    at.engine.info["kv_events"] = described
    await incarnation(at, 3, subscription=2)
    await begin(at)


@REPLAY
async def test_http_down_while_zmq_is_up_keeps_what_is_known(replay: int, scene: MakeScene) -> None:
    at = await scene(replay=replay)
    await at.engine.stop_http()
    await at.router.until(lambda: _is(at, "unhealthy"), "unhealthy")
    at.cache.evict(at.prompts[0], 2)
    at.cache.store(at.prompts[5])
    await at.engine.start_http()
    await at.router.until(lambda: _is(at, "ready"), "ready again")
    await at.exact()
    assert (await at.worker())["incarnation"] == 1


async def _is(at: Scene, state: str) -> bool:
    return bool((await at.worker())["state"] == state)


@REPLAY
async def test_zmq_down_while_http_is_up_costs_the_credit_and_not_the_worker(replay: int, scene: MakeScene) -> None:
    """The same process and the same cache: only its socket was gone."""
    at = await scene(replay=replay)
    at.engine.close_publisher()
    await at.state("unreachable", "no publisher answered")
    await at.serve(2)
    assert (await at.worker())["state"] == "ready"
    await at.engine.open_publisher()
    await at.engine.listened()
    at.cache.store(at.prompts[5])
    await at.exact()
    assert ((await at.worker())["incarnation"], (await at.rank())["restarts"]) == (1, 0)


@REPLAY
async def test_a_health_flap_with_another_startup_time_is_another_process(replay: int, scene: MakeScene) -> None:
    """Case 110. Its publisher's connection never broke: a relay in between can hide that."""
    at = await scene(replay=replay)
    await at.engine.stop_http()
    await at.router.until(lambda: _is(at, "unhealthy"), "unhealthy")
    at.cache.died(next_seq=3)
    at.engine.info["startup_time"] = {"tokenizer_e2e": 3.25}
    await at.engine.start_http()
    await incarnation(at, 2)
    at.cache.store(at.prompts[1])
    await at.exact()


async def test_a_health_flap_around_a_silent_stream_is_another_process_where_there_is_no_startup_time(
    scene: MakeScene,
) -> None:
    """Design, section 3: vLLM gives none."""
    at = await scene()
    del at.engine.info["startup_time"]
    await incarnation(at, 2)
    await begin(at)
    await at.engine.stop_http()
    await at.router.until(lambda: _is(at, "unhealthy"), "unhealthy")
    at.cache.died(next_seq=3)
    await at.engine.start_http()
    await incarnation(at, 3)
    at.cache.store(at.prompts[1])
    await at.exact()

"""What runs behind a URL: incarnations and their ranks, against real loopback engines."""

from __future__ import annotations

from typing import Any

import pytest

from router.config import KvEventsConfig
from tests.fleet.helpers import MakeEngine, MakeFleet, Recorder, ready, settings, shown
from tests.support.engine import FakeEngine, stored
from tests.support.waiting import until

# ---- incarnations


async def test_a_restart_that_shows_only_in_server_info_is_a_new_incarnation(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Case 110; interface.md: noticed within 12 s by default."""
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    await engine.listened()
    (worker,) = fleet.workers
    (old,) = worker.ranks
    slot = old.slot
    old.account.place(10, 10, 0.0, 1.0)
    engine.info["startup_time"] = {"tokenizer_e2e": 2.5}
    await ready(fleet, incarnation=2)
    (new,) = worker.ranks
    assert new is not old
    assert (old.dead, new.slot != slot, new.account.requests, new.last_seq) == (True, True, 0, None)
    await until(lambda: engine.subscriptions_ever() == 2, "the new subscription")
    await until(lambda: engine.subscriptions() == 1, "the old one closed")


@pytest.mark.parametrize(
    "change",
    [{"served_model_name": "other"}, {"model_path": "/models/other"}, {"kv_events": None}, {"dp_size": 2}],
    ids=str,
)
async def test_a_changed_model_or_descriptor_is_a_new_incarnation(
    change: dict[str, Any], make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    engine.info |= change
    await ready(fleet, incarnation=2)


async def test_live_values_of_the_same_process_are_no_new_incarnation(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    engine.info["max_total_num_tokens"] = 2000
    await until(lambda: shown(fleet)["capacity_tokens"] == 2000, "the new capacity")
    assert shown(fleet)["incarnation"] == 1


async def test_an_engine_restarted_on_its_port_is_another_incarnation_and_waits_for_its_health(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    await engine.stop()
    await until(lambda: shown(fleet)["state"] == "unhealthy", "unhealthy")
    engine.info["startup_time"] = {"tokenizer_e2e": 9.0}
    engine.statuses["/health"] = 503
    await engine.start()
    await until(lambda: shown(fleet)["incarnation"] == 2, "the restart")
    assert shown(fleet)["state"] in ("starting", "unhealthy")
    await until(lambda: shown(fleet)["state"] == "starting", "loading")
    engine.statuses["/health"] = 200
    await ready(fleet, incarnation=2)


# ---- ranks


@pytest.mark.parametrize(
    "descriptor",
    [None, "zmq", {"block_size": 0}, {"block_size": "64"}, {"dp_size": 0}, {"dp_size": 1000000}, {"publisher": "nats"}],
    ids=str,
)
async def test_a_broken_descriptor_costs_the_cache_view_not_the_worker(
    descriptor: Any, make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Case 14."""
    engine = await make_engine()
    whole = engine.info["kv_events"]
    engine.info["kv_events"] = {**whole, **descriptor} if isinstance(descriptor, dict) else descriptor
    fleet = make_fleet(workers=(settings(engine.url),))
    worker = await ready(fleet)
    (rank,) = worker["ranks"]
    assert (rank["rank"], rank["state"], rank["blocks"]) == (0, "off", {})
    assert "kv_events" in rank["reason"]
    assert (worker["block_size"], worker["advertised_block_size"], worker["hash"]) == (None, None, None)
    assert fleet.workers[0].ranks[0].trusted is False
    engine.info["kv_events"] = whole
    worker = await ready(fleet, incarnation=2)
    assert worker["ranks"][0]["state"] != "off"


async def test_ranks_that_cannot_exist_are_refused_loudly_and_the_others_work(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Case 16."""
    engine = await make_engine()
    engine.info["kv_events"] |= {"endpoint_port_base": 65534, "dp_size": 4}
    fleet = make_fleet(workers=(settings(engine.url),))
    worker = await ready(fleet)
    assert [r["rank"] for r in worker["ranks"]] == [0, 1, 2, 3]
    assert [r["state"] == "off" for r in worker["ranks"]] == [False, False, True, True]
    assert "65535" in worker["ranks"][3]["reason"]
    assert [r.pin for r in fleet.workers[0].ranks] == [0, 1, 2, 3]


async def test_a_worker_with_fewer_ranks_than_before_loses_the_others(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    observer = Recorder()
    engine = await make_engine(dp_size=3)
    fleet = make_fleet(workers=(settings(engine.url),), observer=observer)
    await ready(fleet)
    engine.info["kv_events"]["dp_size"] = 1
    worker = await ready(fleet, incarnation=2)
    assert [r["rank"] for r in worker["ranks"]] == [0]
    assert observer.ranks_removed == [1, 2]
    assert fleet.workers[0].ranks[0].pin is None, "a single rank needs no pin"


async def test_without_a_descriptor_a_data_parallel_engine_is_one_target(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine(dp_size=4)
    engine.info["kv_events"] = None
    fleet = make_fleet(workers=(settings(engine.url),))
    worker = await ready(fleet)
    assert [r["rank"] for r in worker["ranks"]] == [0]
    assert fleet.workers[0].ranks[0].pin is None


def as_vllm(engine: FakeEngine) -> None:
    engine.statuses = {"/server_info": 404, "/get_server_info": 404}
    engine.bodies["/version"] = b'{"version":"0.32.0"}'
    engine.bodies["/v1/models"] = b'{"data":[{"id":"base","root":"/models/base"}]}'


async def test_vllm_without_settings_is_routed_by_load_and_says_what_to_set(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    as_vllm(engine)
    fleet = make_fleet(workers=(settings(engine.url),))
    worker = await ready(fleet)
    assert (worker["engine"], worker["model"], worker["ranks"][0]["state"]) == ("vllm", "base", "off")
    assert "workers[].kv_events" in worker["ranks"][0]["reason"]


async def test_vllm_with_settings_has_streams(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    engine = await make_engine(dp_size=2)
    as_vllm(engine)
    kv_events = KvEventsConfig(endpoint_port_base=engine.kv_base, dp_size=2, block_size=16, topic="")
    fleet = make_fleet(workers=(settings(engine.url, kv_events=kv_events),))
    worker = await ready(fleet)
    assert [r["state"] != "off" for r in worker["ranks"]] == [True, True]
    assert worker["advertised_block_size"] == 16
    await engine.listened(1)


async def test_a_loaded_adapter_is_no_new_incarnation(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    engine = await make_engine()
    as_vllm(engine)
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    engine.bodies["/v1/models"] = b'{"data":[{"id":"base","root":"/models/base"},{"id":"sql","parent":"base"}]}'
    await until(lambda: fleet.models() == ["base", "sql"], "the adapter is listed")
    assert shown(fleet)["incarnation"] == 1


async def test_vllm_that_lost_its_health_in_silence_is_another_process(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Design section 3: vLLM gives no startup_time to compare."""
    engine = await make_engine()
    as_vllm(engine)
    kv_events = KvEventsConfig(endpoint_port_base=engine.kv_base, block_size=4)
    fleet = make_fleet(workers=(settings(engine.url, kv_events=kv_events),))
    await ready(fleet)
    engine.statuses["/health"] = 500
    await until(lambda: shown(fleet)["state"] == "unhealthy", "unhealthy")
    looks = engine.asked("/v1/models")
    await until(lambda: engine.asked("/v1/models") > looks + 2, "described while unhealthy")
    assert shown(fleet)["incarnation"] == 1, "judged once, when health is back"
    engine.statuses["/health"] = 200
    await ready(fleet, incarnation=2)


async def test_vllm_whose_stream_went_on_is_the_same_process(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    engine = await make_engine()
    as_vllm(engine)
    kv_events = KvEventsConfig(endpoint_port_base=engine.kv_base, block_size=4)
    fleet = make_fleet(workers=(settings(engine.url, kv_events=kv_events),))
    await ready(fleet)
    await engine.listened()
    await engine.stop_http()
    await until(lambda: shown(fleet)["state"] == "unhealthy", "unhealthy")
    engine.publish(stored([1], [1, 2, 3, 4], 4))
    await until(lambda: shown(fleet)["ranks"][0]["blocks"] == {"GPU": 1}, "a block")
    await engine.start_http()
    worker = await ready(fleet)
    assert worker["ranks"][0]["blocks"] == {"GPU": 1}

"""Membership, models and states, against real loopback engines."""

from __future__ import annotations

import asyncio

import pytest

from router.config import FleetConfig, Secret
from router.errors import RouterError
from tests.fleet.helpers import MakeEngine, MakeFleet, Recorder, ready, settings, shown
from tests.support.engine import free_ports
from tests.support.waiting import until

# ---- membership


async def test_configured_workers_become_routable_by_their_url_alone(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    observer = Recorder()
    fleet = make_fleet(workers=(settings(engine.url),), observer=observer)
    worker = await ready(fleet)
    assert [w.url.text for w in fleet.routable("tiny")] == [engine.url]
    assert fleet.routable(None) == fleet.workers
    assert observer.states == [(engine.url, "starting"), (engine.url, "ready")]
    assert {key: worker[key] for key in ("url", "incarnation", "model", "role", "state", "reason")} == {
        "url": engine.url,
        "incarnation": 1,
        "model": "tiny",
        "role": "plain",
        "state": "ready",
        "reason": "",
    }
    assert (worker["advertised_block_size"], worker["block_size"], worker["capacity_tokens"]) == (4, 4, 1000)


async def test_one_engine_under_three_spellings_is_one_worker(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    """Case 87."""
    engine = await make_engine()
    fleet = make_fleet()
    first, created = fleet.add(settings(engine.url))
    assert created
    for spelling in (engine.url + "/", engine.url.replace("http", "HTTP")):
        assert fleet.add(settings(spelling)) == (first, False)
    assert len(fleet.workers) == 1


async def test_the_same_url_with_other_settings_is_a_conflict(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    """Case 87: a second registration must not leave the old object routable beside the new one."""
    engine = await make_engine()
    fleet = make_fleet()
    fleet.add(settings(engine.url, model="a", api_key=Secret("k")))
    assert fleet.add(settings(engine.url, model="a", api_key=Secret("k")))[1] is False
    for other in ({"model": "b", "api_key": Secret("k")}, {"model": "a", "api_key": Secret("other")}, {}):
        with pytest.raises(RouterError) as refused:
            fleet.add(settings(engine.url, **other))
        assert refused.value.code == "conflict"


async def test_a_removed_worker_is_gone_at_once_and_a_re_add_starts_from_nothing(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Case 32."""
    engine = await make_engine()
    observer = Recorder()
    fleet = make_fleet(workers=(settings(engine.url),), observer=observer)
    await ready(fleet)
    await engine.listened()
    (old,) = fleet.workers
    (rank,) = old.ranks
    rank.account.place(10, 10, 0.0, 1.0)
    assert fleet.remove(engine.url.upper() + "/")
    assert (fleet.routable(None), fleet.workers, fleet.describe(), observer.removed) == ([], [], [], [engine.url])
    assert (old.state, old.routable, old.ranks, rank.dead) == ("draining", False, (), True)
    assert rank.account.requests == 1, "open requests stay counted on the object that was incremented"
    assert not fleet.remove(engine.url)
    new, created = fleet.add(settings(engine.url))
    assert created
    assert new is not old
    assert new.incarnation == 0
    worker = await ready(fleet)
    assert (worker["incarnation"], worker["ranks"][0]["inflight_requests"]) == (1, 0)
    await until(lambda: engine.subscriptions_ever() == 2, "the new subscription")
    await until(lambda: engine.subscriptions() == 1, "the old subscription is gone")


async def test_removing_what_is_no_worker_url_is_a_bad_request(make_fleet: MakeFleet) -> None:
    with pytest.raises(RouterError) as refused:
        make_fleet().remove("engine-0")
    assert refused.value.code == "bad_request"


async def test_no_secret_is_shown(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    """Case 103."""
    engine = await make_engine()
    fleet = make_fleet(worker_api_key=Secret("sesame-1"), workers=(settings(engine.url, api_key=Secret("sesame-2")),))
    await ready(fleet)
    assert "sesame" not in repr(fleet.describe())
    assert {key for path, key in engine.requests} == {"Bearer sesame-2"}, "the worker's own key beats the general one"


async def test_a_new_general_key_reaches_the_workers_without_one_of_their_own(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """interface.md: SIGHUP re-reads workers and keys."""
    engines = [await make_engine() for _ in range(2)]
    fleet = make_fleet(
        worker_api_key=Secret("old"),
        workers=(settings(engines[0].url), settings(engines[1].url, api_key=Secret("own"))),
    )
    fleet.set_worker_api_key(Secret("new"))
    assert [w.authorization for w in fleet.workers] == ["Bearer new", "Bearer own"]
    fleet.set_worker_api_key(None)
    assert [w.authorization for w in fleet.workers] == [None, "Bearer own"]


# ---- models


async def test_models_are_known_while_their_workers_are_down_and_after_they_left(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Case 93: unknown is 404, known but down is 503."""
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    assert not fleet.known_model("tiny")
    await ready(fleet)
    for name in ("tiny", "/models/tiny", "tiny:sql"):
        assert fleet.known_model(name)
        assert len(fleet.routable(name)) == 1
    for name in ("nope", "nope:sql", "tin", ""):
        assert not fleet.known_model(name)
        assert fleet.routable(name) == []
    assert fleet.models() == ["tiny"]
    fleet.remove(engine.url)
    assert fleet.known_model("tiny")
    assert (fleet.routable("tiny"), fleet.models()) == ([], [])


async def test_the_operators_model_beats_the_engines(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url, model="mine"),))
    assert fleet.known_model("mine"), "known before the engine answers"
    worker = await ready(fleet)
    assert (worker["model"], worker["role"], fleet.models()) == ("mine", "plain", ["mine"])
    assert fleet.routable("tiny") == []


async def test_a_name_served_by_several_workers_is_listed_once(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    engines = [await make_engine() for _ in range(2)]
    engines[1].info["served_model_name"] = ["tiny", "big"]
    fleet = make_fleet(workers=tuple(settings(e.url) for e in engines))
    await ready(fleet)
    assert fleet.models() == ["big", "tiny"]
    assert [w.url.text for w in fleet.routable("tiny")] == [e.url for e in engines]
    assert [w.url.text for w in fleet.routable("big")] == [engines[1].url]


# ---- becoming ready


@pytest.mark.parametrize("trouble", [503, 500, 401, b"<html>", b"[]"], ids=str)
async def test_a_worker_that_cannot_describe_itself_yet_is_asked_again_until_it_can(
    trouble: int | bytes, make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Cases 86 and 92."""
    engine = await make_engine()
    if isinstance(trouble, int):
        engine.statuses["/server_info"] = trouble
    else:
        engine.bodies["/server_info"] = trouble
    fleet = make_fleet(workers=(settings(engine.url),))
    await until(lambda: engine.asked("/server_info") >= 3, "asking again")
    worker = shown(fleet)
    assert (worker["state"], worker["ranks"], fleet.routable(None)) == ("starting", [], [])
    assert "/server_info" in worker["reason"]
    if trouble == 401:
        assert worker["reason"] == "401 from /server_info: set workers[].api_key or worker_api_key"
    engine.statuses["/server_info"] = 200
    engine.bodies.clear()
    await ready(fleet)


async def test_a_worker_nobody_started_yet_is_unhealthy_and_joins_without_a_router_restart(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Case 86."""
    engine = await make_engine(start=False)
    fleet = make_fleet(workers=(settings(engine.url),))
    await until(lambda: shown(fleet)["state"] == "unhealthy", "unhealthy")
    assert shown(fleet)["reason"] == "connection refused"
    await engine.start()
    await ready(fleet)


async def test_an_engine_that_is_described_but_still_loading_gets_nothing(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Engine contract, section 1: /server_info answers 200 while /health is still 503."""
    engine = await make_engine()
    engine.statuses["/health"] = 503
    fleet = make_fleet(workers=(settings(engine.url),))
    await until(lambda: engine.asked("/health") >= 5 and shown(fleet)["ranks"], "looked at several times")
    assert (shown(fleet)["state"], shown(fleet)["reason"]) == ("starting", "503 from /health")
    assert (fleet.routable(None), fleet.known_model("tiny")) == ([], True)
    engine.statuses["/health"] = 200
    await ready(fleet)


# ---- health


async def test_a_ready_worker_whose_health_fails_goes_out_and_comes_back(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    engine.statuses["/health"] = 503
    await until(lambda: shown(fleet)["state"] == "unhealthy", "unhealthy")
    assert (fleet.routable("tiny"), shown(fleet)["reason"]) == ([], "503 from /health")
    assert fleet.known_model("tiny")
    engine.statuses["/health"] = 200
    worker = await ready(fleet)
    assert worker["incarnation"] == 1, "the same startup_time: the same process, its blocks are kept"


async def test_a_worker_back_from_unhealthy_is_described_before_it_is_used(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    engine.statuses["/server_info"] = 500
    engine.statuses["/health"] = 503
    await until(lambda: shown(fleet)["state"] == "unhealthy", "unhealthy")
    engine.statuses["/health"] = 200
    await until(lambda: shown(fleet)["state"] == "starting", "health back, not described")
    assert (shown(fleet)["reason"], fleet.routable(None)) == ("500 from /server_info", [])
    engine.statuses["/server_info"] = 200
    await ready(fleet)


async def test_a_ready_worker_keeps_serving_when_only_its_description_fails(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    engine.bodies["/server_info"] = b"garbage"
    await until(lambda: "/server_info is not a JSON object" in shown(fleet)["reason"], "the failure is shown")
    assert (shown(fleet)["state"], len(fleet.routable(None))) == ("ready", 1)


async def test_two_failed_requests_take_a_worker_out_at_once_and_have_it_probed_at_once(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    slow = FleetConfig(probe_interval_s=600, info_interval_s=600)
    fleet = make_fleet(workers=(settings(engine.url),), fleet=slow)
    await ready(fleet)
    (worker,) = fleet.workers
    fleet.fault(worker, "connect")
    fleet.served(worker)
    fleet.fault(worker, "connect")
    assert fleet.routable("tiny") == [worker]
    looks = engine.asked("/health"), engine.asked("/server_info")
    fleet.fault(worker, "connect")
    assert fleet.routable("tiny") == []
    assert (worker.state, worker.reason) == ("unhealthy", "2 requests in a row failed: connect")
    await ready(fleet)
    assert engine.asked("/health") > looks[0]
    assert engine.asked("/server_info") > looks[1]


async def test_errors_that_are_answers_never_take_a_worker_out(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    """Case 89."""
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    (worker,) = fleet.workers
    for kind in ("connect", "http_500", "connect", "http_502", "http_504", "http_500", "http_500"):
        fleet.fault(worker, kind)
    assert fleet.routable("tiny") == [worker]


async def test_a_fault_reported_for_a_removed_worker_is_ignored(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    engine = await make_engine()
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    (worker,) = fleet.workers
    fleet.remove(engine.url)
    for _ in range(3):
        fleet.fault(worker, "connect")
    assert worker.state == "draining"


# ---- robustness


async def test_two_hundred_workers_come_and_go_and_leave_nothing(make_fleet: MakeFleet) -> None:
    """Case 30."""
    fleet = make_fleet()
    base = free_ports(1)
    before = len(asyncio.all_tasks())
    for port in range(base, base + 200):
        fleet.add(settings(f"http://127.0.0.1:{port}"))
    for port in range(base, base + 200):
        assert fleet.remove(f"http://127.0.0.1:{port}")
    await until(lambda: len(asyncio.all_tasks()) == before, "every task is gone")


async def test_closing_ends_every_task_and_socket(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    engine = await make_engine(dp_size=2)
    before = asyncio.all_tasks()
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    await engine.listened(1)
    await fleet.close()
    assert asyncio.all_tasks() == before
    await until(lambda: engine.subscriptions(0) == engine.subscriptions(1) == 0, "unsubscribed")

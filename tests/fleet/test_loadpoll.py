"""The queue of engines that announce no load, from vLLM's /metrics."""

from __future__ import annotations

import msgspec
import pytest

from router.config import FleetConfig
from router.fleet.loadpoll import parse_vllm_metrics
from router.fleet.registry import Fleet
from tests.fleet.helpers import FAST, MakeEngine, MakeFleet, ready, settings
from tests.support.engine import FakeEngine
from tests.support.waiting import until

PAGE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="ti,ny"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 7.0
vllm:num_requests_waiting{engine="1",model_name="ti,ny"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 99.0
"""


def test_running_and_waiting_are_read_for_each_engine_of_the_page() -> None:
    assert parse_vllm_metrics(PAGE) == {0: (3, 7), 1: (1, 0)}
    assert parse_vllm_metrics(b"vllm:num_requests_waiting 2\n") == {0: (0, 2)}


@pytest.mark.parametrize(
    "page", [b"", b"\xff\xfe", b'vllm:num_requests_waiting{engine="0"} NaN\n', b"vllm:num_requests_waiting 1e\n"]
)
def test_a_page_without_usable_numbers_says_nothing(page: bytes) -> None:
    assert not any(any(counts) for counts in parse_vllm_metrics(page).values())


async def vllm(make_engine: MakeEngine, page: bytes = PAGE) -> FakeEngine:
    engine = await make_engine()
    engine.statuses |= {"/server_info": 404, "/version": 200}
    engine.bodies |= {
        "/version": b'{"version": "0.32.0"}',
        "/v1/models": msgspec.json.encode({"data": [{"id": "tiny"}]}),
        "/metrics": page,
    }
    return engine


def fleet_of(make_fleet: MakeFleet, engine: FakeEngine, load_poll_s: float) -> Fleet:
    fast = FleetConfig(
        probe_interval_s=FAST.probe_interval_s,
        probe_timeout_s=FAST.probe_timeout_s,
        info_interval_s=FAST.info_interval_s,
        load_poll_s=load_poll_s,
    )
    return make_fleet(fleet=fast, workers=(settings(engine.url),))


async def test_what_waits_at_a_vllm_engine_counts_as_queued_work_there(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """case 57: the polled value plus what was sent since"""
    fleet = fleet_of(make_fleet, await vllm(make_engine), load_poll_s=0.05)
    await ready(fleet)
    account = fleet.workers[0].ranks[0].account
    account.place(1000, 200, 0.0, 120.0)
    await until(lambda: account.reported_queue_tokens == 7 * 200, "7 waiting requests of 200 tokens each")
    assert account.report is not None
    assert (account.report.running, account.report.waiting) == (4, 7), "one target: the engines behind it are summed"


async def test_a_removed_worker_is_asked_no_more(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    engine = await vllm(make_engine)
    fleet = fleet_of(make_fleet, engine, load_poll_s=0.05)
    await ready(fleet)
    await until(lambda: ("/metrics", None) in engine.requests, "asked")
    fleet.remove(engine.url)
    await fleet.close()
    asked = len(engine.requests)
    await until(lambda: not fleet.workers, "gone")
    assert len(engine.requests) == asked


async def test_zero_means_never(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    engine = await vllm(make_engine)
    fleet = fleet_of(make_fleet, engine, load_poll_s=0.0)
    await ready(fleet)
    await until(lambda: engine.requests.count(("/version", None)) >= 2, "looked at twice")
    assert ("/metrics", None) not in engine.requests


async def test_an_engine_without_metrics_is_served_by_the_own_view(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await vllm(make_engine)
    engine.statuses["/metrics"] = 404
    fleet = fleet_of(make_fleet, engine, load_poll_s=0.05)
    await ready(fleet)
    await until(lambda: engine.requests.count(("/metrics", None)) >= 2, "asked again")
    assert fleet.workers[0].ranks[0].account.report is None

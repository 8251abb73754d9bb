"""Roles: the engine's word counts, a contradiction is named, a change in place changes the pool (case 62)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.fleet.registry import Fleet
from tests.fleet.helpers import MakeEngine, MakeFleet, settings
from tests.support.engine import FakeEngine
from tests.support.waiting import until


def drift(fleet: Fleet, kind: str) -> dict[str, Any] | None:
    (worker,) = fleet.describe()
    return next((one for one in worker["drift"] if one["kind"] == kind), None)


async def ready(fleet: Fleet) -> dict[str, Any]:
    await until(lambda: fleet.routable(None), "ready")
    (worker,) = fleet.describe()
    return worker


@pytest.mark.parametrize("configured", ["plain", "prefill", "decode"])
@pytest.mark.parametrize("said", ["null", "prefill", "decode"])
async def test_the_engines_role_wins_and_a_contradiction_is_named(
    said: str, configured: Any, make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    engine.info |= {"disaggregation_mode": said, "disaggregation_bootstrap_port": engine.port}
    fleet = make_fleet(workers=(settings(engine.url, role=configured),))
    actual = "plain" if said == "null" else said
    worker = await ready(fleet)
    assert worker["role"] == actual
    found = drift(fleet, "role")
    if configured == actual:
        assert found is None
    else:
        assert found is not None
        assert (found["advertised"], found["observed"]) == (configured, actual)


async def test_an_engine_that_does_not_speak_of_roles_has_the_configured_one(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """vLLM, and SGLang before disaggregation."""
    engine = await make_engine()
    del engine.info["disaggregation_mode"]
    engine.info["disaggregation_bootstrap_port"] = engine.port
    fleet = make_fleet(workers=(settings(engine.url, role="prefill"),))
    assert (await ready(fleet))["role"] == "prefill"
    assert drift(fleet, "role") is None
    pools = fleet.pools("tiny")
    assert ([len(pools.plain), len(pools.prefill), len(pools.decode)], pools.missing()) == (
        [0, 1, 0],
        "no_decode_workers",
    )


async def test_a_role_that_changes_in_place_moves_the_engine_to_the_other_pool_and_is_named(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """SGLang's --enable-pd-role-switch: the same process, another role."""
    engine = await make_engine()
    engine.info |= {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": engine.port}
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    assert len(fleet.pools("tiny").prefill) == 1
    engine.info["disaggregation_mode"] = "decode"
    await until(lambda: len(fleet.pools("tiny").decode) == 1, "in the decode pool")
    assert fleet.pools("tiny").prefill == []
    found = drift(fleet, "role")
    assert found is not None
    assert (found["advertised"], found["observed"]) == ("prefill", "decode")
    assert "while the engine ran" in found["advice"]


async def test_a_role_that_is_new_after_a_restart_is_no_drift(make_engine: MakeEngine, make_fleet: MakeFleet) -> None:
    engine = await make_engine()
    engine.info |= {"disaggregation_mode": "decode"}
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    engine.info |= {"disaggregation_mode": "null", "startup_time": {"tokenizer_e2e": 9.0}}
    await until(lambda: len(fleet.pools("tiny").plain) == 1, "in the plain pool")
    assert drift(fleet, "role") is None


async def test_a_bootstrap_port_nobody_can_reach_is_named_until_somebody_can(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine = await make_engine()
    listening = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    engine.info |= {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": port}
    fleet = make_fleet(workers=(settings(engine.url),))
    assert (await ready(fleet))["bootstrap_port"] == port
    assert drift(fleet, "bootstrap") is None
    listening.close()
    await listening.wait_closed()
    found = await until(lambda: drift(fleet, "bootstrap"), "the closed port is named")
    assert found["advertised"] == f"127.0.0.1:{port}"
    assert "--disaggregation-bootstrap-port" in found["advice"]
    again = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
    await until(lambda: drift(fleet, "bootstrap") is None, "open again")
    again.close()


async def test_a_prefill_engine_without_a_bootstrap_port_is_in_no_pool(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    engine: FakeEngine = await make_engine()
    engine.info |= {"disaggregation_mode": "prefill"}
    fleet = make_fleet(workers=(settings(engine.url),))
    await ready(fleet)
    assert fleet.pools("tiny").prefill == []
    found = drift(fleet, "bootstrap")
    assert found is not None
    assert found["observed"] == "no bootstrap port"


async def test_a_decode_engine_without_events_has_its_ranks_all_the_same(
    make_engine: MakeEngine, make_fleet: MakeFleet
) -> None:
    """Without a radix cache it announces nothing; requests are pinned to its ranks and counted on them."""
    engine = await make_engine()
    engine.info |= {"disaggregation_mode": "decode", "dp_size": 3, "kv_events": None}
    fleet = make_fleet(workers=(settings(engine.url),))
    assert [(r["rank"], r["state"]) for r in (await ready(fleet))["ranks"]] == [(0, "off"), (1, "off"), (2, "off")]
    assert [rank.pin for rank in fleet.workers[0].ranks] == [0, 1, 2]

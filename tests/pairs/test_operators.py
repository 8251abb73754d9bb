"""What people are told of a split fleet: doctor, the live page, metrics, the access log."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any, Literal

import pytest

from router.config import Overrides, WorkerConfig, build_config
from router.contract.server_info import ServerInfo
from router.contract.url import WorkerUrl
from router.doctor.examine import examine
from router.doctor.findings import Diagnosis, Finding
from router.doctor.judge import split_findings
from router.fleet.observer import NullObserver
from router.fleet.worker import Worker
from router.observe.access import access_line
from tests.pairs.conftest import Engine, MakeSplit
from tests.pairs.test_split_fleet import completion, settled
from tests.support.waiting import until
from tests.ui.chromium import chromium
from tests.ui.events import events

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


async def checked(*urls: str, **settings: Any) -> list[Diagnosis]:
    document = {"workers": [{"url": url} for url in urls], **settings}
    return await examine(build_config(document, Overrides(), {}, Path()), seconds=1.0, probe=True)


def finding(diagnosis: Diagnosis, kind: str) -> Finding | None:
    return next((one for one in diagnosis.findings if one.kind == kind), None)


async def test_doctor_has_nothing_against_a_whole_split_fleet(engine: Engine) -> None:
    """Nor does --probe send half a request to anybody."""
    made = [await engine(role="prefill", dp_size=2), await engine(role="decode")]
    diagnoses = await checked(*(one.url for one in made))
    assert [diagnosis.ok for diagnosis in diagnoses] == [True, True], diagnoses
    assert [finding(diagnosis, "half_pool") for diagnosis in diagnoses] == [None, None]
    assert [one.refused for one in made] == [0, 0]


@pytest.mark.parametrize(("role", "code"), [("prefill", "no_decode_workers"), ("decode", "no_prefill_workers")])
async def test_doctor_names_half_a_pool(engine: Engine, role: str, code: str) -> None:
    made = [await engine(role=role), await engine(role=role), await engine()]
    diagnoses = await checked(*(one.url for one in made))
    found = [finding(diagnosis, "half_pool") for diagnosis in diagnoses]
    assert found[2] is None
    for one in found[:2]:
        assert one is not None
        assert (one.severity, code in one.advice) == ("error", True)
    alone = finding((await checked(made[0].url))[0], "half_pool")
    assert alone is not None
    assert alone.severity == "warning"


def test_doctor_names_a_loopback_host_that_decode_engines_elsewhere_are_sent_to() -> None:
    def worker(url: str, role: Literal["prefill", "decode"]) -> Worker:
        settings = WorkerConfig(url=WorkerUrl.parse(url))
        made = Worker(settings, authorization=None, unhealthy_after=3, clock=lambda: 0.0, observer=NullObserver())
        made.take_info(ServerInfo("sglang", model_names=("m",), role=role, says_role=True, bootstrap_port=8998))
        return made

    here, there = worker("http://127.0.0.1:1", "decode"), worker("http://10.0.0.2:1", "decode")
    prefill = worker("http://localhost:30000", "prefill")
    assert split_findings([prefill, here]) == {}
    (found,) = split_findings([prefill, here, there])[prefill.url.text]
    assert (found.severity, found.kind) == ("error", "bootstrap_host")
    assert split_findings([worker("http://10.0.0.1:1", "prefill"), there]) == {}


async def test_doctor_names_a_bootstrap_port_that_cannot_be_reached(engine: Engine) -> None:
    made = await engine(role="prefill")
    assert made.bootstrap is not None
    port = made.bootstrap.port
    await made.bootstrap.stop()
    found = finding((await checked(made.url))[0], "drift_bootstrap")
    assert found is not None
    assert f"127.0.0.1:{port}" in found.what
    assert "--disaggregation-bootstrap-port" in found.advice


async def test_doctor_names_a_role_that_is_not_the_configured_one(engine: Engine) -> None:
    made = await engine(role="decode")
    (diagnosis,) = await checked(made.url)
    assert finding(diagnosis, "drift_role") is None
    config = build_config({"workers": [{"url": made.url, "role": "prefill"}]}, Overrides(), {}, Path())
    found = finding((await examine(config, seconds=1.0, probe=False))[0], "drift_role")
    assert found is not None
    assert found.what == "advertised prefill, observed decode"


async def test_the_live_page_is_sent_both_halves_of_a_decision(split: MakeSplit) -> None:
    made = await split(decode_options={"dp_size": 2})
    await made.post("/v1/completions", completion())
    async with events(made.running) as seen:
        _, hello = await seen.next()
    assert {worker["role"] for worker in hello["workers"]} == {"prefill", "decode"}
    (decision,) = hello["decisions"]
    assert decision["worker"] == made.prefill[0].url
    assert decision["decode"][0] == made.decode[0].url
    assert decision["decode"][1] in (0, 1)


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine (Debian: chromium)")
async def test_the_live_page_names_half_a_pool_and_a_port_nobody_can_reach(split: MakeSplit) -> None:
    made = await split()
    assert PROGRAM is not None
    await made.post("/v1/completions", completion())
    async with chromium(PROGRAM) as browser:
        await browser.open(f"{made.running.admin}/ui")
        await browser.until("document.querySelectorAll('#decisions > li').length === 1")
        assert "→" in await browser.value("document.querySelector('#decisions > li .to').textContent")
        assert await browser.value("problems().length") == 0
        await made.decode[0].stop()
        titles = "problems().map(one => one.title).join('; ')"
        await browser.until(f"({titles}).includes('Half a pool: no decode engine for tiny')")
        bootstrap = made.prefill[0].bootstrap
        assert bootstrap is not None
        await bootstrap.stop()
        await browser.until(f"({titles}).includes('drift (bootstrap)')")
        assert browser.complaints == []


async def test_metrics_tell_pairs_roles_and_where_the_time_went(split: MakeSplit) -> None:
    made = await split(decode=2)
    for seed in range(4):
        await made.post("/v1/completions", completion(seed))
    await settled(made)
    metric = made.running.metric
    assert await metric("ready_role_workers", role="prefill") == 1
    assert await metric("ready_role_workers", role="decode") == 2
    assert await metric("ready_role_workers", role="plain") == 0
    assert await metric("worker_role", worker=made.prefill[0].url, role="prefill") == 1
    assert await metric("pairs_total", outcome="ok") == 4
    assert await metric("pair_prefill_seconds_count") == 4
    assert await metric("prefill_legs") == 0
    assert await metric("prompt_tokens_total") == 4 * 200, "each prompt counts once, not once a leg"
    assert await metric("requests_total", outcome="ok") == 4


async def test_the_access_line_names_both_halves(split: MakeSplit) -> None:
    made = await split()
    await made.post("/v1/completions", completion())
    requests = made.running.service.core._requests
    await until(lambda: requests.finished == 1, "recorded")
    (placed,) = requests.recent()
    assert placed.record is not None
    line = access_line(0.0, placed.record, placed)
    assert (line.worker, line.rank) == (made.prefill[0].url, 0)
    assert (line.decode_worker, line.decode_rank) == (made.decode[0].url, 0)


async def test_clients_cannot_name_a_place_to_meet_in_body_or_head(split: MakeSplit) -> None:
    """Case 107. SGLang 0.5.23 lets x-override-bootstrap-host beat the body."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        port = trap.getsockname()[1]
        made = await split()
        status, _, _ = await made.post("/v1/completions", completion(bootstrap_host="127.0.0.1", bootstrap_port=port))
        assert status == 400
        heads = {"x-override-bootstrap-host": "127.0.0.1", "x-override-bootstrap-port": str(port)}
        status, _, _ = await made.post("/v1/completions", completion(), **heads)
        assert status == 200
        trap.setblocking(False)
        with pytest.raises(BlockingIOError):
            trap.accept()

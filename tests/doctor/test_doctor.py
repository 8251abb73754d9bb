"""Every planted fault is named by doctor, with the flag or key that mends it in the advice."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from router.config import Config, Overrides, build_config
from router.doctor.command import doctor
from router.doctor.examine import examine
from router.doctor.findings import Diagnosis, Finding, as_json, exit_code
from router.engine.app import SimulatedEngine
from router.engine.options import EngineOptions
from router.hashing import Namespace, Scheme, pack_ids, prompt_keys
from tests.support.engine import FakeEngine, free_ports, stored

LISTEN_S = 1.5
WIDTH = 4


def config(*workers: dict[str, Any], **settings: Any) -> Config:
    return build_config({"workers": list(workers), **settings}, Overrides(), {}, Path())


async def checked(worker: dict[str, Any], *, probe: bool = False, **settings: Any) -> Diagnosis:
    (diagnosis,) = await examine(config(worker, **settings), seconds=LISTEN_S, probe=probe)
    return diagnosis


def finding(diagnosis: Diagnosis, kind: str) -> Finding:
    found = [each for each in diagnosis.findings if each.kind == kind]
    assert found, f"no {kind} among {[(f.kind, f.what) for f in diagnosis.findings]}"
    return found[0]


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = FakeEngine(context, dp_size=2, block_size=WIDTH)
    made.info["enable_cache_report"] = True
    await made.start()
    yield made
    await made.stop()
    context.destroy(linger=0)


@pytest.fixture
async def simulated() -> AsyncIterator[SimulatedEngine]:
    made = SimulatedEngine(EngineOptions(port=0, dp_size=2))
    await made.start()
    yield made
    await made.stop()


Plant = Callable[[FakeEngine], None]


def describe(**changes: Any) -> Plant:
    def plant(engine: FakeEngine) -> None:
        engine.info["kv_events"] = {**engine.info["kv_events"], **changes}

    return plant


def info(**changes: Any) -> Plant:
    return lambda engine: engine.info.update(changes)


@pytest.mark.parametrize(
    ("plant", "kind", "says", "advice"),
    [
        (info(kv_events=None), "no_descriptor", "null", "--kv-events-config"),
        (describe(publisher="kafka"), "no_descriptor", "kafka", "--kv-events-config"),
        (describe(block_size=0), "no_descriptor", "block_size", "--kv-events-config"),
        (describe(endpoint_port_base=65535), "rank_off", "rank 1", "dp_size"),
        (describe(endpoint_host="10.9.8.7"), "descriptor", "10.9.8.7", "kv_events"),
        (lambda engine: engine.close_publisher(1), "rank_unreachable", "rank 1", "port"),
        (info(enable_cache_report=False), "cache_report", "not reported", "--enable-cache-report"),
        (lambda engine: None, "no_replay", "replay", "replay_endpoint"),
        (lambda engine: None, "no_load_reports", "load", "--load-publish-endpoint"),
        (describe(replay_endpoint_port_base=free_ports(2)), "replay_silent", "does not answer", "replay"),
        (describe(load_endpoint_port_base=free_ports(2)), "load_silent", "no load report", "load port"),
        (info(disaggregation_mode="prefill"), "role", "prefill", "plain traffic"),
        (lambda engine: engine.statuses.update({"/health": 503}), "health", "starting", "/health"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_fault_in_what_the_engine_says_of_itself_is_named(
    plant: Plant, kind: str, says: str, advice: str, engine: FakeEngine
) -> None:
    """cases 14, 15, 16, 34, 62, 86"""
    plant(engine)
    found = finding(await checked({"url": engine.url}), kind)
    assert says in found.what
    assert advice in found.advice


async def test_vllm_is_not_accused_of_a_report_that_it_says_nothing_about(engine: FakeEngine) -> None:
    """vLLM 0.32 describes no flags; one with --enable-prompt-tokens-details on was told to turn it on."""
    engine.statuses = {"/server_info": 404, "/get_server_info": 404}
    engine.bodies["/version"] = b'{"version":"0.32.0"}'
    engine.bodies["/v1/models"] = b'{"data":[{"id":"base","root":"/models/base"}]}'
    found = finding(await checked({"url": engine.url}), "cache_report")
    assert found.severity == "info"
    assert "--enable-prompt-tokens-details" in found.advice


async def speaking(engine: FakeEngine, speak: Callable[[int], None], **worker: Any) -> Diagnosis:
    """Examines the engine while `speak(n)` publishes, n = 0, 1, 2 …, one batch or so each."""

    async def talk() -> None:
        await engine.listened(0)
        for number in range(40):
            speak(number)
            await asyncio.sleep(0.01)

    talking = asyncio.create_task(talk())
    try:
        return await checked({"url": engine.url, **worker})
    finally:
        talking.cancel()


def chain(blocks: int, width: int, seed: int) -> tuple[list[int], list[int]]:
    ids = random.Random(seed).choices(range(5, 4000), k=blocks * width)
    keys = prompt_keys(Scheme("sglang-sha256", width, False), pack_ids(ids), Namespace())
    assert keys is not None
    return keys, ids


async def test_a_healthy_stream_is_all_well_and_its_hash_proven(engine: FakeEngine) -> None:
    def speak(number: int) -> None:
        engine.publish(stored(*chain(2, WIDTH, number), WIDTH))
        engine.publish(stored(*chain(2, WIDTH, number), WIDTH), rank=1)

    diagnosis = await speaking(engine, speak)
    assert diagnosis.ok, diagnosis.findings
    assert "recomputed and equal" in diagnosis.summary
    assert "2 of 2 ranks live" in diagnosis.summary
    assert exit_code([diagnosis]) == 0


async def test_another_topic_on_the_wire_is_named(engine: FakeEngine) -> None:
    """The router's own subscription hears nothing at all: only the wiretap can tell why."""
    wire_topic = dict(engine.info["kv_events"])
    wire_topic["topic"] = "kv@pod-7"
    shown = {**engine.info, "kv_events": {**engine.info["kv_events"], "topic": "kv-events"}}
    engine.bodies["/server_info"] = msgspec.json.encode(shown)
    engine.info["kv_events"] = wire_topic
    diagnosis = await speaking(engine, lambda n: engine.publish(stored(*chain(1, WIDTH, n), WIDTH)))
    found = finding(diagnosis, "topic")
    assert "kv@pod-7" in found.what
    assert "topic" in found.advice


async def test_another_width_on_the_wire_is_named(engine: FakeEngine) -> None:
    """case 46: an engine that advertises the physical page under decode-context parallelism"""
    diagnosis = await speaking(engine, lambda n: engine.publish(stored(*chain(2, 16, n), 16)))
    found = finding(diagnosis, "drift_block_size")
    assert "4" in found.what
    assert "16" in found.what
    assert not diagnosis.ok


async def test_another_hash_on_the_wire_is_named(engine: FakeEngine) -> None:
    def speak(number: int) -> None:
        keys, ids = chain(2, WIDTH, number)
        engine.publish(stored([key ^ 1 for key in keys], ids, WIDTH))

    finding(await speaking(engine, speak), "drift_hash")


async def test_two_publishers_on_one_rank_are_named(engine: FakeEngine) -> None:
    """case 16: their sequences interleave"""

    def speak(number: int) -> None:
        for start in (100, 900):
            engine.next_seq[0] = start + number
            engine.publish(stored(*chain(1, WIDTH, start + number), WIDTH))

    found = finding(await speaking(engine, speak), "duplicate_publishers")
    assert "rank 0" in found.what


async def test_a_rank_that_speaks_as_another_is_named(engine: FakeEngine) -> None:
    """case 12"""
    diagnosis = await speaking(engine, lambda n: engine.publish(stored(*chain(1, WIDTH, n), WIDTH), says_rank=1))
    found = finding(diagnosis, "drift_ranks")
    assert "rank" in found.what


async def test_messages_that_are_no_batches_are_named(engine: FakeEngine) -> None:
    found = finding(await speaking(engine, lambda n: engine.publish_raw(b"\xc1 rubbish")), "unusable_messages")
    assert "payload" in found.what


async def test_no_traffic_without_probes_is_no_fault(engine: FakeEngine) -> None:
    diagnosis = await checked({"url": engine.url})
    assert diagnosis.ok
    assert "--probe" in finding(diagnosis, "nothing_heard").advice


async def test_an_engine_that_wants_a_key_could_not_be_checked(engine: FakeEngine) -> None:
    """case 92"""
    engine.statuses["/server_info"] = 401
    diagnosis = await checked({"url": engine.url})
    assert "api_key" in finding(diagnosis, "key").advice
    assert exit_code([diagnosis]) == 2


async def test_nobody_at_the_address_could_not_be_checked() -> None:
    diagnosis = await checked({"url": f"http://127.0.0.1:{free_ports(1)}"})
    finding(diagnosis, "unreachable")
    assert exit_code([diagnosis]) == 2


async def test_probes_of_a_sound_engine_agree_with_everything(simulated: SimulatedEngine) -> None:
    diagnosis = await checked({"url": simulated.url}, probe=True)
    assert [f for f in diagnosis.findings if f.severity != "info"] == []
    assert "recomputed and equal" in diagnosis.summary


async def test_a_publisher_nobody_hears_shows_when_probes_were_served(
    simulated: SimulatedEngine, engine: FakeEngine
) -> None:
    """case 17: a connection is accepted, nothing ever comes"""
    deaf = {"endpoint_port_base": engine.kv_base, "replay_endpoint_port_base": free_ports(2)}
    diagnosis = await checked({"url": simulated.url, "kv_events": deaf}, probe=True)
    found = finding(diagnosis, "rank_silent")
    assert "tcp://*" in found.advice
    assert not diagnosis.ok


async def test_another_models_tokenizer_shows_in_the_ids(simulated: SimulatedEngine, tmp_path: Path) -> None:
    """case 43"""
    folder = simulated.options.model_path
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:200]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    found = finding(await checked({"url": simulated.url}, probe=True, tokenizer={"path": str(tmp_path)}), "prompt")
    assert "tokenizer.path" in found.advice


def test_something_wrong_beats_could_not_check() -> None:
    well = Diagnosis("a", True, (Finding("warning", "no_replay", "w", "a"),), "")
    ill = Diagnosis("b", True, (Finding("error", "topic", "w", "a"),), "")
    away = Diagnosis("c", False, (Finding("error", "unreachable", "w", "a"),), "")
    assert exit_code([well]) == 0
    assert exit_code([well, ill, away]) == 1
    assert exit_code([well, away]) == 2
    assert [engine["ok"] for engine in as_json([well, ill, away])["engines"]] == [True, False, False]


def test_the_command_prints_promised_json(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_ports(1)}"
    assert doctor([url], config=None, seconds=0.3, probe=False, as_json_text=True) == 2
    (engine,) = json.loads(capsys.readouterr().out)["engines"]
    assert (engine["url"], engine["ok"]) == (url, False)
    assert set(engine["findings"][0]) == {"severity", "kind", "what", "advice"}


def test_the_report_shows_each_finding_with_its_advice(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_ports(1)}"
    assert doctor([url], config=None, seconds=0.3, probe=False, as_json_text=False) == 2
    out = capsys.readouterr().out
    assert url in out
    assert "unreachable" in out
    assert "→" in out

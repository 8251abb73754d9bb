"""`bench calibrate`: what is fitted is what was there."""

from __future__ import annotations

import asyncio
import json
import random

import msgspec
import pytest

from router.bench import calibrate
from router.bench.calibrate import simulate
from router.bench.fit import fit
from router.bench.replay import Profile
from router.cli import main
from router.engine.app import SimulatedEngine
from router.engine.options import EngineOptions
from router.engine.timing import TimingProfile
from router.errors import ConfigError
from tests.support.engine import free_ports

SLOW = TimingProfile(
    prefill_tokens_per_s=25_000.0,
    attention_context_tokens=8_000.0,
    step_overhead_s=0.002,
    decode_step_s=0.008,
    per_sequence_s=0.001,
    per_kv_token_s=0.0,
)


def test_exact_measurements_give_back_their_coefficients() -> None:
    rng = random.Random(1)
    rows = [[1.0, float(rng.randrange(1, 9999)), float(rng.randrange(1, 10**8))] for _ in range(9)]
    found = fit(rows, [0.003 + 5e-5 * row[1] + 5e-10 * row[2] for row in rows])
    assert found == pytest.approx([0.003, 5e-5, 5e-10], rel=1e-6)


def test_a_coefficient_that_would_be_negative_is_left_out() -> None:
    rows = [[1.0, float(n)] for n in range(5)]
    assert fit(rows, [5.0 - n for n in range(5)]) == pytest.approx([3.0, 0.0])


def test_measurements_that_cannot_tell_are_refused() -> None:
    with pytest.raises(ValueError, match="apart"):
        fit([[1.0, 2.0], [1.0, 2.0]], [1.0, 1.0])


def test_the_model_of_two_requests_at_once_shares_the_rank() -> None:
    alone, queued = simulate(TimingProfile(chunk_tokens=1000), 16, [(0.0, 1000, 1), (0.0, 1000, 1)])
    assert queued.ttft_s == pytest.approx(2 * alone.ttft_s)


async def test_the_profile_of_a_simulated_engine_is_its_own_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "CHECK_REQUESTS", 6)
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    engine = SimulatedEngine(EngineOptions(port=0, context_length=4096, timing=SLOW))
    await engine.start()
    try:
        lines: list[str] = []
        document = await calibrate.calibrate(engine.url, seed=1, told=lines.append)
    finally:
        await engine.stop()
    profile = msgspec.json.decode(json.dumps(document), type=Profile)
    assert profile.timing.prefill_tokens_per_s == pytest.approx(25_000, rel=0.5)
    assert profile.timing.step_overhead_s + profile.timing.decode_step_s == pytest.approx(0.010, rel=0.5)
    assert document["check"]["ttft_mean_s"]["model"] == pytest.approx(
        document["check"]["ttft_mean_s"]["engine"], rel=0.6
    )
    assert document["fit_error"] < 0.4
    assert any("prefill" in line for line in lines)


def test_a_url_where_nobody_answers_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "calibrate", f"http://127.0.0.1:{free_ports(1)}"]) == 2
    assert "no engine answers" in capsys.readouterr().err


async def test_an_engine_that_refuses_is_named() -> None:
    engine = SimulatedEngine(EngineOptions(port=0, tokens=64, context_length=4096, timing=SLOW))
    await engine.start()
    try:
        with pytest.raises(ConfigError, match=engine.url):
            await asyncio.wait_for(calibrate.calibrate(engine.url, seed=1, told=lambda line: None), 20)
    finally:
        await engine.stop()

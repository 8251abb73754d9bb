"""`bench calibrate`: what is fitted is what was there."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import asdict, replace

import msgspec
import pytest

from router.bench import calibrate
from router.bench.calibrate import fit_error, fitted, prefill_row, simulate
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


def measured(timing: TimingProfile) -> list[calibrate.Measured]:
    """What an engine of exactly this timing would show."""
    rows = [prefill_row(cached, uncached, 4096) for cached in (0, 2000, 8000) for uncached in (160, 1600, 4000, 8000)]
    rows += [
        (1.0, 0.0, 0.0, 0.0, float(batch * prompt), 1.0, float(batch)) for batch in (1, 4, 8) for prompt in (44, 4108)
    ]
    token_s = 1 / timing.prefill_tokens_per_s
    context_s = token_s / timing.attention_context_tokens
    again_s = timing.cached_attention * context_s
    kv_s, sequence_s = timing.per_kv_token_s, timing.per_sequence_s
    worth = (timing.step_overhead_s, token_s, context_s, again_s, kv_s, timing.decode_step_s, sequence_s)
    return [calibrate.Measured(row, sum(a * b for a, b in zip(row, worth, strict=True))) for row in rows]


@pytest.mark.parametrize("cached_attention", [0.0, 1.0])
def test_what_was_measured_gives_back_the_timing(cached_attention: float) -> None:
    timing = replace(SLOW, chunk_tokens=4096, per_kv_token_s=1e-7, cached_attention=cached_attention)
    seen = measured(timing)
    found = fitted(seen, chunk_tokens=4096, max_running=timing.max_running)
    assert asdict(found) == pytest.approx(asdict(timing), rel=1e-3, abs=1e-3)
    assert fit_error(seen, found) < 1e-6


def test_a_prompt_of_two_chunks_has_the_first_as_cached_context_of_the_second() -> None:
    assert prefill_row(100, 30, 20) == (2.0, 30.0, 20 * 110 + 10 * 125, 100**2 / 2 + 120**2 / 2, 220.0, 0.0, 0.0)


async def test_a_simulated_engine_is_measured_and_compared_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert profile.timing.prefill_tokens_per_s == pytest.approx(25_000, rel=0.9)
    assert document["check"].keys() >= {"requests", "span_s", "ttft_mean_s", "tpot_mean_s"}
    assert document["check"]["ttft_mean_s"]["model"] > 0
    assert 0 <= document["fit_error"] < 1
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

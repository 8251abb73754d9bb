"""`bench replay`: traces, closed forms, peers' rules, and the policy on loads that broke others."""

from __future__ import annotations

import io
import json
import lzma
import random
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from router.bench.replay import ALL_POLICIES, print_table, run, sweep
from router.bench.replay_plot import plot
from router.bench.sim.result import measure
from router.bench.sim.router import Setup
from router.bench.sim.trace import Trace, TraceRequest, ideal_hit_rate, load_trace, siblings, spread
from router.bench.sim.world import World
from router.cli import main
from router.engine.timing import TimingProfile
from router.errors import ConfigError

WIDTH = 512
INSTANT = TimingProfile(1e12, 1e18, 0.0, 0.0, 0.0, 0.0, 1 << 40, 10_000)


def chats(count: int, turns: int, seed: int = 1, gap_s: float = 0.3) -> Trace:
    """Conversations that all begin with one block and then grow by two a turn."""
    rng = random.Random(seed)
    requests = [TraceRequest(0.0, WIDTH, 1, (0,))]
    for chat in range(count):
        at_s, keys = 0.5 + rng.uniform(0, 4 * gap_s), [0]
        for turn in range(turns):
            keys = [*keys, *(1 + 1000 * chat + 2 * turn + i for i in range(2))]
            requests.append(TraceRequest(at_s, len(keys) * WIDTH - 7, 40, tuple(keys)))
            at_s += rng.uniform(2 * gap_s, 6 * gap_s)
    return Trace("chats", WIDTH, tuple(sorted(requests, key=lambda r: r.at_s)))


def setup(policy: str = "kv", **settings: Any) -> Setup:
    return Setup(**{"policy": policy, "engines": 4, "capacity_tokens": 400_000, **settings})


def results(trace: Trace, *setups: Setup, second_half: bool = False) -> list[dict[str, Any]]:
    measured = []
    for one in setups:
        world = World(trace, one)
        world.run()
        measured.append(measure(world, second_half=second_half))
    return measured


@pytest.mark.parametrize("second_half", [False, True])
def test_one_rank_with_unbounded_cache_and_instant_service_reaches_the_ideal_hit_rate(second_half: bool) -> None:
    trace = chats(20, 6)
    row = results(
        trace,
        setup(engines=1, capacity_tokens=10**9, timing=INSTANT, event_delay_s=(0.0, 0.0)),
        second_half=second_half,
    )[0]
    assert row["hit_rate"] == pytest.approx(ideal_hit_rate(trace, second_half=second_half))
    assert ideal_hit_rate(trace) > 0.7


def test_every_request_is_answered_once_under_every_policy_and_accounting_returns_to_zero() -> None:
    trace = chats(12, 4)
    for name in ALL_POLICIES:
        world = World(trace, setup(name, replicas=2, report_every_s=0.1, speeds=(1.0, 0.5)))
        world.run()
        assert all(job.finished_s is not None for job in world.jobs), name
        for target in (target for router in world.routers for target in router.targets):
            load = target.account
            assert (load.requests, load.tokens, load.queued_uncached_tokens, load.decoding) == (0, 0, 0, 0), name


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others() -> None:
    trace = chats(12, 4)
    first, again, other = results(trace, *(setup("random", seed=seed) for seed in (1, 1, 2)))
    assert first == again
    assert first != other


def test_kv_beats_round_robin_where_pure_overlap_sends_everything_to_one_rank() -> None:
    """case 49: every prompt shares its first block"""
    trace = chats(60, 6, gap_s=0.2)
    kv, overlap, round_robin = results(trace, *(setup(name) for name in ("kv", "overlap", "round_robin")))
    assert overlap["load_max_over_mean"] == pytest.approx(4.0, abs=0.2), "all of it on one of 4 ranks"
    assert kv["load_max_over_mean"] < 1.5
    assert kv["hit_rate"] > 1.5 * round_robin["hit_rate"]
    assert kv["ttft_s"]["mean"] < 0.6 * round_robin["ttft_s"]["mean"]


def test_siblings_of_a_burst_meet_on_one_rank_only_with_prediction() -> None:
    """case 53: at a load that computing every sibling anew would be too much for"""
    requests = tuple(TraceRequest(i * 0.35, 30 * WIDTH, 5, tuple(range(100 * i, 100 * i + 30))) for i in range(20))
    burst = siblings(Trace("burst", WIDTH, requests), 4, 0.01)
    on, off = results(burst, setup(), setup(prediction_ttl_s=0.0))
    assert on["hit_rate"] > off["hit_rate"] + 0.2
    assert on["ttft_s"]["mean"] < off["ttft_s"]["mean"]


def test_siblings_of_a_burst_meet_on_one_rank_though_they_come_to_several_routers() -> None:
    """case 53: each router tells the others what it placed, within the 10 ms between two of a burst"""
    requests = tuple(TraceRequest(i * 0.35, 30 * WIDTH, 5, tuple(range(100 * i, 100 * i + 30))) for i in range(20))
    burst = siblings(Trace("burst", WIDTH, requests), 4, 0.01)
    alone, blind, told = results(burst, setup(), setup(replicas=4), setup(replicas=4, sibling_delay_s=0.005))
    assert blind["hit_rate"] < alone["hit_rate"] - 0.2
    assert told["hit_rate"] == pytest.approx(alone["hit_rate"], abs=0.02)
    assert told["ttft_s"]["mean"] < 1.1 * alone["ttft_s"]["mean"] < 0.6 * blind["ttft_s"]["mean"]


def test_a_hot_prefix_is_replicated_instead_of_melting_one_rank() -> None:
    """case 49: 200 concurrent requests share 4k tokens on 8 ranks"""
    hot = tuple(range(8))
    requests = tuple(TraceRequest(i * 0.002, 9 * WIDTH - 300, 50, (*hot, 1000 + i)) for i in range(200))
    row = results(Trace("hot", WIDTH, requests), setup(engines=8, capacity_tokens=2_000_000))[0]
    assert row["load_max_over_mean"] <= 1.3
    assert row["hit_rate"] >= 0.8


def test_a_rank_of_half_speed_gets_less_work_once_speeds_are_reported() -> None:
    requests = tuple(TraceRequest(i * 0.05, 4 * WIDTH, 2, tuple(range(10 * i, 10 * i + 4))) for i in range(400))
    blind = setup(engines=2, speeds=(1.0, 0.25))
    told = replace(blind, report_every_s=0.1)
    shares = []
    for one in (blind, told):
        world = World(Trace("cold", WIDTH, requests), one)
        world.run()
        shares.append(world.placed.count(1) / len(world.placed))
    assert shares[1] < 0.3 < shares[0] + 0.1


def test_replicas_see_each_others_load_through_the_engines_reports_or_what_they_tell_each_other() -> None:
    """case 57: prompts of very different lengths, none seen before"""
    rng, at_s = random.Random(5), 0.0
    requests = []
    for number in range(400):
        at_s += rng.expovariate(1 / 0.12)
        blocks = rng.choice([1, 2, 3, 40])
        keys = tuple(range(100 * number, 100 * number + blocks))
        requests.append(TraceRequest(at_s, blocks * WIDTH, 3, keys))
    trace = Trace("cold", WIDTH, tuple(requests))
    reports: dict[str, Any] = {"report_every_s": 0.1, "report_delay_s": 0.05}
    alone, blind, told = results(trace, setup(), setup(replicas=4), setup(replicas=4, **reports))
    assert told["ttft_s"]["mean"] < 1.2 * alone["ttft_s"]["mean"]
    assert told["ttft_s"]["mean"] < 0.9 * blind["ttft_s"]["mean"]
    (met,) = results(trace, setup(replicas=4, sibling_delay_s=0.01))
    assert met["ttft_s"]["mean"] < 1.1 * alone["ttft_s"]["mean"], "what siblings tell each other needs no report"


def test_a_host_tier_serves_what_the_gpu_has_no_room_for() -> None:
    trace = chats(60, 6, gap_s=0.2)
    small = setup(capacity_tokens=20_000)
    without, beside = results(trace, small, replace(small, host_capacity_tokens=400_000))
    assert without["host_hit_rate"] == 0
    assert beside["host_hit_rate"] > 0.1
    assert beside["hit_rate"] > without["hit_rate"] + 0.1
    assert beside["ttft_s"]["mean"] < without["ttft_s"]["mean"]


def test_equal_timestamps_are_spread_in_order_up_to_the_next() -> None:
    requests = tuple(TraceRequest(at_s, 9, 1, (i,)) for i, at_s in enumerate([0.0, 0.0, 0.0, 3.0, 6.0]))
    times = [r.at_s for r in spread(Trace("t", 512, requests), random.Random(1)).requests]
    assert times == sorted(times)
    assert times[2] < 3.0 == times[3]
    assert len(set(times[:3])) == 3


def write_trace(path: Path, trace: Trace) -> Path:
    lines = [
        json.dumps(
            {
                "timestamp": round(r.at_s * 1000),
                "input_length": r.prompt_tokens,
                "output_length": r.output_tokens,
                "hash_ids": r.keys,
            }
        )
        for r in trace.requests
    ]
    with lzma.open(path, "wt") if path.suffix == ".xz" else path.open("w") as file:
        file.write("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.jsonl.xz"])
def test_a_mooncake_file_is_read_with_its_block_width(tmp_path: Path, name: str) -> None:
    trace = chats(3, 2)
    read = load_trace(write_trace(tmp_path / name, trace))
    assert read.width == WIDTH
    assert [r.keys for r in read.requests] == [r.keys for r in trace.requests]


def sessions_file(path: Path) -> Path:
    def call(t: float, blocks: int, **more: Any) -> dict[str, Any]:
        return {"t": t, "type": "n", "in": blocks * 64 + 5, "out": 3, "hash_runs": [[1, blocks]], **more}

    agent = {"t": 20.0, "type": "subagent", "requests": [call(0.0, 2), call(1.0, 3)]}
    long = {"id": "long", "block_size": 64, "requests": [call(0.0, 4000)]}
    chat = {"id": "chat", "block_size": 64, "requests": [call(0.0, 4), agent, call(500.0, 9)]}
    path.write_text("\n".join(json.dumps(record) for record in (chat, long)) + "\n")
    return path


def test_packed_sessions_are_mixed_with_their_sub_agents_capped_pauses_and_without_the_long_ones(
    tmp_path: Path,
) -> None:
    trace = load_trace(sessions_file(tmp_path / "sessions.jsonl"), seed=3, sessions=5)
    assert trace.width == 64
    assert [len(r.keys) for r in trace.requests] == [4, 2, 3, 9]
    first = trace.requests[0].at_s
    assert [round(r.at_s - first, 6) for r in trace.requests] == [0.0, 20.0, 21.0, 81.0]


@pytest.mark.parametrize("text", ["", "{}", "[1]", "no json", '{"hash_ids": [1], "timestamp": 0}'])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"--trace .*trace\.jsonl"):
        load_trace(path)


def test_the_command_writes_the_promised_json_and_a_plot(tmp_path: Path) -> None:
    trace, out, svg = write_trace(tmp_path / "t.jsonl", chats(8, 4)), tmp_path / "out.json", tmp_path / "plot.svg"
    argv = ["bench", "replay", "--trace", str(trace), "--engines", "2", "--capacity-tokens", "100000", "--seed", "1"]
    argv += ["--seed", "2", "--policy", "kv", "--policy", "dynamo", "--second-half"]
    assert main([*argv, "--json", str(out), "--plot", str(svg)]) == 0
    document = json.loads(out.read_text())
    assert {"trace", "engines", "capacity_tokens", "time_factor", "seeds", "runs"} <= document.keys()
    assert document["seeds"] == [1, 2]
    assert [row["policy"] for row in document["runs"]] == ["kv", "dynamo"]
    for row in document["runs"]:
        assert {"requests", "hit_rate", "ttft_s", "tpot_s", "goodput", "load_max_over_mean"} <= row.keys()
        assert row["requests"] == 17
        assert row["ttft_s"].keys() == {"mean", "p50", "p90", "p99"}
    lines = [element for element in ET.parse(svg).iter() if element.tag.endswith("polyline")]
    assert len(lines) == 4, "two policies in two panels"


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--policy", "kvv"], "--policy kvv"),
        (["--engines", "0"], "--engines"),
        (["--time-factor", "nan"], "--time-factor"),
        (["--report-delay", "1"], "no effect without --report-every"),
        (["--capacity-tokens", "512"], "--capacity-tokens"),
        (["--speeds", "-1"], "--speeds"),
        (["--sibling-delay", "10"], "needs --replicas 2"),
        (["--host-tokens", "-1"], "--host-tokens"),
        (["--host-tokens", "512", "--host-read", "0"], "--host-read"),
    ],
)
def test_a_wrong_argument_ends_with_2_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: Sequence[str], complaint: str
) -> None:
    trace = write_trace(tmp_path / "t.jsonl", chats(2, 2))
    assert main(["bench", "replay", "--trace", str(trace), *more]) == 2
    assert complaint in capsys.readouterr().err


def test_the_table_shows_every_policy_and_the_spread_of_its_seeds() -> None:
    result = run(chats(8, 4), setup(), policies=["kv", "random"], seeds=[1, 2, 3])
    out = io.StringIO()
    print_table(result, Console(file=out, width=90))
    text = out.getvalue()
    assert "kv" in text
    assert "random" in text
    assert f"{result['runs'][1]['ttft_spread']:.1%}" in text
    assert f"{result['ideal_hit_rate']:.4f}" in text


def test_a_plot_of_one_point_is_still_a_plot() -> None:
    assert ET.fromstring(plot("a & b", {"kv": [(1.0, 0.1, 1.0)]})) is not None
    curves = sweep(chats(4, 2), setup(), policies=["kv"], seed=1, second_half=False)
    assert [point[0] for point in curves["kv"]] == sorted(point[0] for point in curves["kv"])

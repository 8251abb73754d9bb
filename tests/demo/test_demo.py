"""The demo's own parts: a schedule that repeats, an oracle that is an upper bound, findings that can fail."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from router.demo.oracle import UnboundedCache
from router.demo.run import demo
from router.demo.stats import PhaseStats, findings, met_once, percentile
from router.demo.workload import make_workload
from router.hashing import pack_ids
from tests.support.process import is_up, process, wait_until


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    assert make_workload(2, 6.0, seed=1) == make_workload(2, 6.0, seed=1)
    assert make_workload(2, 6.0, seed=1) != make_workload(2, 6.0, seed=2)


def test_every_turn_is_scheduled_within_the_duration_and_in_order() -> None:
    for user in make_workload(3, 8.0, seed=4):
        times = [turn.at_s for conversation in user.conversations for turn in conversation.turns]
        assert times == sorted(times)
        assert times[-1] < 8.0


def test_the_oracle_counts_whole_pages_seen_before_and_never_the_last_token() -> None:
    oracle = UnboundedCache(4)
    oracle.request(pack_ids(range(12)))
    assert oracle.cached_tokens == 0
    oracle.request(pack_ids(range(12)))
    assert oracle.cached_tokens == 8
    oracle.request(pack_ids([*range(8), 99, 98, 97, 96, 95]), continued_tokens=12)
    assert oracle.cached_tokens == 8 + 12
    assert oracle.prompt_tokens == 12 + 12 + 13


def phase(policy: str, cached: int, ttft_s: list[float]) -> PhaseStats:
    return PhaseStats(policy, len(ttft_s), 0, 1000, cached, cached, 0.8, ttft_s)


def test_findings_hold_for_a_good_run_and_fail_for_a_bad_one() -> None:
    good = findings(phase("kv", 790, [0.1, 0.2]), phase("round_robin", 300, [0.3, 0.9]))
    assert all(holds for _, holds in good)
    bad = findings(phase("kv", 500, [0.4, 2.0]), phase("round_robin", 300, [0.3, 0.9]))
    assert [holds for _, holds in bad] == [False, False, False, False, True]


def test_percentiles_are_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([7.0], 0.99)) == (50.0, 99.0, 7.0)


def test_one_engine_is_refused_because_there_is_nothing_to_choose(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo(duration_s=1, engines=1, seed=1, json_path=None) == 2
    assert "--engines" in capsys.readouterr().err


def test_a_short_demo_runs_end_to_end_and_writes_the_promised_json(tmp_path: Path) -> None:
    """Two engines for two seconds: whether the findings hold is not asked of so short a run, that it is sound is."""
    path = tmp_path / "demo.json"
    assert demo(duration_s=2.0, engines=2, seed=1, json_path=path) in (0, 1)
    document = json.loads(path.read_text())
    assert (document["engines"], document["duration_s"]) == (2, 2.0)
    for policy in ("kv", "round_robin"):
        result = document[policy]
        assert result["errors"] == 0
        assert result["requests"] > 10
        assert 0 <= result["cached_tokens"] <= result["prompt_tokens"]
        assert result["predicted_cached_tokens"] <= result["prompt_tokens"]
        assert set(result["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    assert document["kv"]["requests"] == document["round_robin"]["requests"]


def test_a_short_disaggregated_demo_meets_every_pair_once(tmp_path: Path) -> None:
    """Two prefill engines with two ranks each and three decode engines, for two seconds."""
    path = tmp_path / "demo.json"
    assert demo(duration_s=2.0, engines=4, seed=1, json_path=path, disaggregated=True) in (0, 1)
    document = json.loads(path.read_text())
    assert (document["engines"], document["disaggregated"]) == (5, True)
    for policy in ("kv", "round_robin"):
        result = document[policy]
        assert result["errors"] == 0
        assert result["requests"] > 10
        assert result["rooms"] == {"met": result["requests"], "failed": 0, "reused": 0, "refused": 0}


def test_a_room_that_failed_or_was_used_twice_is_a_finding() -> None:
    good = PhaseStats("kv", 10, rooms={"met": 10, "failed": 0, "reused": 0, "refused": 0})
    assert met_once(good)[1]
    for name in ("failed", "reused", "refused"):
        assert not met_once(PhaseStats("kv", 10, rooms={**good.rooms, name: 1}))[1]
    assert not met_once(PhaseStats("kv", 11, rooms=good.rooms))[1]


def test_a_demo_that_is_told_to_end_leaves_no_process_behind(tmp_path: Path) -> None:
    """`timeout`, systemd and CI send SIGTERM, not Ctrl-C."""
    log = tmp_path / "demo.log"
    with process([sys.executable, "-m", "router", "demo", "--engines", "2", "--duration", "300"], log) as running:
        wait_until(lambda: re.search(r"live page http://\S+/ui", log.read_text()), 60, "the live page's address")
        (page,) = re.findall(r"live page (http://\S+/ui)", log.read_text())
        assert is_up(page)
        running.terminate()
        assert running.wait(30) == 143
        assert not is_up(page)

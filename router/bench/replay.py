"""`bench replay`: a trace through the real index and policies against simulated engines, in virtual time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from router.bench.sim.peers import PEERS
from router.bench.sim.result import combine, measure
from router.bench.sim.router import Setup
from router.bench.sim.trace import Trace, ideal_hit_rate, siblings, spread
from router.bench.sim.world import World
from router.engine.timing import TimingProfile
from router.errors import ConfigError
from router.policy.decide import POLICY_NAMES

ALL_POLICIES = (*POLICY_NAMES, *PEERS)
DEFAULT_POLICIES = ("kv", "round_robin")
SIBLING_GAP_S = 0.01
PLOT_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
"""Loads of a plot, relative to --time-factor."""


class Profile(msgspec.Struct, frozen=True):
    """What `bench calibrate` writes: the timing of one engine, and where it comes from."""

    engine: str
    source: str
    timing: TimingProfile


def read_profile(path: Path) -> Profile:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--profile {path}: {error}") from None


def check_policies(names: Sequence[str]) -> None:
    """Raises ConfigError."""
    for name in names:
        if name not in ALL_POLICIES:
            raise ConfigError(f"--policy {name}: not one of {', '.join(ALL_POLICIES)}")


def run(
    trace: Trace,
    setup: Setup,
    *,
    policies: Sequence[str],
    seeds: Sequence[int],
    second_half: bool = False,
    sibling_count: int = 1,
    told: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The JSON document of interface.md. `setup.policy` and `setup.seed` are replaced by each of those given; `told`
    hears of each finished run. Raises ConfigError for a trace that does not fit the ranks."""
    check_policies(policies)
    runs = []
    for policy in policies:
        started = time.perf_counter()
        rows = [_one(trace, replace(setup, policy=policy, seed=seed), second_half, sibling_count) for seed in seeds]
        runs.append({"policy": policy, **combine(rows), "wall_s": round(time.perf_counter() - started, 2)})
        told(f"{policy}: {len(seeds)} run(s) in {runs[-1]['wall_s']} s")
    return {
        "trace": trace.name,
        "requests": len(trace.requests) * sibling_count,
        "engines": setup.engines,
        "capacity_tokens": setup.capacity_tokens,
        "time_factor": setup.time_factor,
        "replicas": setup.replicas,
        "sibling_delay_s": setup.sibling_delay_s,
        "host_capacity_tokens": setup.host_capacity_tokens,
        "seeds": list(seeds),
        "second_half": second_half,
        "ideal_hit_rate": ideal_hit_rate(trace, second_half=second_half),
        "runs": runs,
    }


def _one(trace: Trace, setup: Setup, second_half: bool, sibling_count: int) -> dict[str, Any]:
    played = spread(trace, random.Random(setup.seed))
    if sibling_count > 1:
        played = siblings(played, sibling_count, SIBLING_GAP_S)
    world = World(played, setup)
    try:
        world.run()
    except ValueError as error:
        raise ConfigError(f"--capacity-tokens {setup.capacity_tokens}: {error}") from None
    return measure(world, second_half=second_half)


def sweep(trace: Trace, setup: Setup, *, policies: Sequence[str], seed: int, second_half: bool) -> dict[str, Any]:
    """For a plot: every policy at several loads. {policy: [(time factor, mean TTFT s, goodput), …]}."""
    check_policies(policies)
    curves: dict[str, Any] = {policy: [] for policy in policies}
    for factor in PLOT_FACTORS:
        for policy in policies:
            at = replace(setup, policy=policy, seed=seed, time_factor=setup.time_factor * factor)
            row = _one(trace, at, second_half, 1)
            curves[policy].append((at.time_factor, row["ttft_s"]["mean"], row["goodput"]))
    return curves


def print_table(result: dict[str, Any], console: Console) -> None:
    """`run`'s result for people. `±`: how far the seeds' mean TTFTs lie apart; `load`: most loaded rank ÷ mean."""
    half = ", second half" if result["second_half"] else ""
    console.print(
        f"{result['trace']}{half}: {result['requests']:,} requests, {result['engines']} ranks of "
        f"{result['capacity_tokens']:,} tokens, time ÷ {result['time_factor']:g}, {len(result['seeds'])} seed(s)"
    )
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("policy", "hit", "TTFT s", "±", "p50", "p90", "p99", "TPOT ms", "good", "load"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for row in result["runs"]:
        ttft, tpot = row["ttft_s"], row["tpot_s"]
        table.add_row(
            row["policy"],
            f"{row['hit_rate']:.3f}",
            f"{ttft['mean']:.3f}",
            f"{row['ttft_spread']:.1%}",
            *(f"{ttft[key]:.2f}" for key in ("p50", "p90", "p99")),
            f"{tpot['p50'] * 1000:.0f}",
            f"{row['goodput']:.3f}",
            f"{row['load_max_over_mean']:.2f}",
        )
    console.print(table)
    console.print(f"one unbounded cache with instant service: hit {result['ideal_hit_rate']:.4f}")

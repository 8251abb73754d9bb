"""`bench replay`: from its arguments to its outputs."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from router.bench.replay import (
    DEFAULT_POLICIES,
    PLOT_FACTORS,
    check_policies,
    print_table,
    read_profile,
    run,
    sweep,
)
from router.bench.replay_plot import plot
from router.bench.sim.router import Setup
from router.bench.sim.trace import load_trace
from router.engine.timing import TimingProfile
from router.errors import ConfigError


def replay(arguments: argparse.Namespace) -> int:
    """Raises ConfigError for what the person who typed it can mend."""
    setup = _setup(arguments)
    policies = tuple(arguments.policy or DEFAULT_POLICIES)
    seeds = tuple(arguments.seed or (1,))
    check_policies(policies)
    trace = load_trace(arguments.trace, seed=arguments.mix_seed, sessions=arguments.sessions)
    console = Console()
    result = run(
        trace,
        setup,
        policies=policies,
        seeds=seeds,
        second_half=arguments.second_half,
        sibling_count=arguments.siblings,
        told=lambda line: console.print(line, style="dim"),
    )
    print_table(result, console)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if arguments.plot is not None:
        loads = ", ".join(f"{setup.time_factor * factor:.3g}" for factor in PLOT_FACTORS)
        console.print(f"plot: time factors {loads}", style="dim")
        curves = sweep(trace, setup, policies=policies, seed=seeds[0], second_half=arguments.second_half)
        arguments.plot.write_text(plot(f"{trace.name}, {setup.engines} ranks", curves), encoding="utf-8")
    return 0


def _setup(arguments: argparse.Namespace) -> Setup:
    for name in ("engines", "capacity_tokens", "replicas", "siblings", "sessions"):
        if getattr(arguments, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least 1")
    for name in ("time_factor", "report_every", "host_read"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise ConfigError(f"--{name.replace('_', '-')}: must be above 0")
    if not all(speed > 0 for speed in arguments.speeds):
        raise ConfigError("--speeds: must be above 0")
    low, high = arguments.event_delay
    if not 0 <= low <= high:
        raise ConfigError("--event-delay: LOW and HIGH are seconds, 0 ≤ LOW ≤ HIGH")
    if arguments.report_delay is not None and arguments.report_every is None:
        raise ConfigError("--report-delay has no effect without --report-every")
    if arguments.sibling_delay is not None and (arguments.replicas < 2 or not arguments.sibling_delay >= 0):
        raise ConfigError("--sibling-delay is in milliseconds, at least 0, and needs --replicas 2 or more")
    if arguments.host_tokens < 0:
        raise ConfigError("--host-tokens: must be at least 0")
    if (arguments.report_delay or 0.0) < 0 or arguments.prediction_ttl < 0:
        raise ConfigError("--report-delay and --prediction-ttl are seconds, at least 0")
    return Setup(
        policy=DEFAULT_POLICIES[0],
        engines=arguments.engines,
        capacity_tokens=arguments.capacity_tokens,
        time_factor=arguments.time_factor,
        replicas=arguments.replicas,
        event_delay_s=(low, high),
        report_every_s=arguments.report_every,
        report_delay_s=arguments.report_delay or 0.0,
        sibling_delay_s=None if arguments.sibling_delay is None else arguments.sibling_delay / 1000,
        host_capacity_tokens=arguments.host_tokens,
        host_read_tokens_per_s=arguments.host_read,
        prediction_ttl_s=arguments.prediction_ttl,
        timing=read_profile(arguments.profile).timing if arguments.profile is not None else TimingProfile(),
        speeds=tuple(arguments.speeds),
    )

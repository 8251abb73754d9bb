"""`kv-router demo`: the same seeded multi-turn load, once KV-aware and once round-robin, on simulated engines.

Everything is real but the model: engine processes with ZMQ event streams, the router as its own process with its own
configuration, chat over HTTP with server-sent events, the tokenizer and template that ship with the package.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from router.demo.client import run_phase
from router.demo.processes import DemoFailure, Fleet, Layout
from router.demo.stats import PhaseStats, findings, met_once
from router.demo.table import NAMES, progress_table, result_table
from router.demo.workload import make_workload

POLICIES = ("kv", "round_robin")


def demo(
    *,
    duration_s: float,
    engines: int,
    seed: int,
    json_path: Path | None,
    hold: bool = False,
    disaggregated: bool = False,
) -> int:
    """`disaggregated`: prefill and decode engines apart, as Layout.split has them; `engines` is not used then.

    Returns 0 when every finding holds, 1 when one does not, 2 when the demo could not run."""
    if engines < 2:
        print("kv-router demo: --engines must be at least 2, or there is nothing to choose", file=sys.stderr)
        return 2
    try:
        layout = Layout.split() if disaggregated else Layout.plain(engines)
        return asyncio.run(_demo(duration_s, layout, seed, json_path, hold))
    except DemoFailure as failure:
        print(f"kv-router demo: {failure}", file=sys.stderr)
        return 2
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM


def _end_on_sigterm() -> None:
    """As Ctrl-C does: engines and router must not outlive a demo that a service manager or `timeout` ends."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def _demo(duration_s: float, layout: Layout, seed: int, json_path: Path | None, hold: bool) -> int:
    _end_on_sigterm()
    console = Console()
    users = make_workload(layout.ranks, duration_s, seed)
    console.print(
        f"{_fleet_words(layout)}, {len(users)} users in multi-turn chats under shared system prompts, "
        f"{duration_s:g} s a policy, seed {seed}. No GPU, no download."
    )
    phases = {policy: PhaseStats(policy) for policy in POLICIES}
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        for policy, stats in phases.items():
            async with Fleet(layout, policy) as fleet:
                console.print(f"{NAMES[policy]}: live page {fleet.admin}/ui", soft_wrap=True)
                started = time.monotonic()

                def show(stats: PhaseStats = stats, fleet: Fleet = fleet, started: float = started) -> None:
                    live.update(progress_table(phases.values(), stats, time.monotonic() - started, duration_s, fleet))

                await run_phase(fleet, users, stats, show)
                stats.rooms = await fleet.rooms()
                stats.predicted_cached_tokens = await fleet.counter("kv_router_predicted_cached_tokens_total")
    kv, round_robin = phases["kv"], phases["round_robin"]
    console.print(result_table(kv, round_robin))
    checks = findings(kv, round_robin)
    if layout.decode:
        checks += [met_once(kv), met_once(round_robin)]
    for text, holds in checks:
        console.print(f"[{'green' if holds else 'red'}]{'✓' if holds else '✗'}[/] {text}")
    for stats in phases.values():
        if stats.first_error:
            console.print(f"[red]first error under {stats.policy}:[/] {stats.first_error}")
    if json_path is not None:
        document = {
            "engines": len(layout.engines),
            "disaggregated": layout.decode > 0,
            "duration_s": duration_s,
            "seed": seed,
            "kv": kv.as_json(),
            "round_robin": round_robin.as_json(),
        }
        await asyncio.to_thread(json_path.write_text, json.dumps(document, indent=2) + "\n")
    if hold:
        await _hold(console, layout, duration_s, seed)
    return 0 if all(holds for _, holds in checks) else 1


def _fleet_words(layout: Layout) -> str:
    if not layout.decode:
        return f"{len(layout.engines)} simulated engines"
    prefill = len(layout.engines) - layout.decode
    return f"{prefill} simulated prefill engines with {layout.ranks} ranks and {layout.decode} decode engines"


async def _hold(console: Console, layout: Layout, duration_s: float, seed: int) -> None:
    """Load without end on one KV-aware fleet, other conversations each round, for whoever looks at the live page."""
    async with Fleet(layout, "kv") as fleet:
        console.print(f"live page: {fleet.admin}/ui   requests: {fleet.base}   Ctrl-C ends it", soft_wrap=True)
        while True:
            seed += 1
            users = make_workload(layout.ranks, duration_s, seed)
            await run_phase(fleet, users, PhaseStats("kv"), lambda: None)

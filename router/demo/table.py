"""What the demo shows: a live line per policy, and the result side by side."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from router.demo.processes import Fleet
from router.demo.stats import PhaseStats, percentile

NAMES = {"kv": "KV-aware", "round_robin": "round-robin"}


def progress_table(
    phases: Iterable[PhaseStats], current: PhaseStats, elapsed_s: float, duration_s: float, fleet: Fleet
) -> Table:
    table = Table(title=f"router {fleet.base}   metrics: {fleet.admin}/metrics")
    for name in ("policy", "progress", "requests", "hit rate", "one unbounded cache", "TTFT p50", "TTFT p99"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for stats in phases:
        share = min(1.0, elapsed_s / duration_s) if stats is current else (1.0 if stats.requests else 0.0)
        table.add_row(NAMES[stats.policy], f"{share:.0%}", *_cells(stats))
    return table


def result_table(kv: PhaseStats, round_robin: PhaseStats) -> Table:
    table = Table(title="the same load, cold engines, one policy after the other")
    for name in ("policy", "requests", "hit rate", "one unbounded cache", "TTFT p50", "TTFT p99"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for stats in (kv, round_robin):
        table.add_row(NAMES[stats.policy], *_cells(stats))
    return table


def _cells(stats: PhaseStats) -> tuple[str, ...]:
    if not stats.requests:
        return (str(stats.requests), "", "", "", "")
    return (
        str(stats.requests),
        f"{stats.hit_rate:.1%}",
        f"{stats.ideal_hit_rate:.1%}",
        f"{percentile(stats.ttft_s, 0.5) * 1e3:.0f} ms",
        f"{percentile(stats.ttft_s, 0.99) * 1e3:.0f} ms",
    )

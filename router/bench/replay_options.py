"""The arguments of `bench replay`. Apart from its code, so that other commands need not import the simulation."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help="Mooncake jsonl or packed agentic sessions; also .xz")
    add("--engines", type=int, default=8, metavar="N", help="simulated ranks")
    add("--capacity-tokens", type=int, default=2_000_000, metavar="N", help="KV cache of each rank")
    add("--policy", action="append", metavar="NAME", help="may be repeated; a wrong name lists all")
    add("--time-factor", type=float, default=1.0, metavar="S", help="the trace's time is divided by it")
    add("--second-half", action="store_true", help="measure the second half only, warmed by the first")
    add("--replicas", type=int, default=1, metavar="R", help="routers that share the load")
    add("--seed", type=int, action="append", metavar="N", help="may be repeated: medians are shown")
    add("--sessions", type=int, default=64, metavar="N", help="packed sessions that are mixed, drawn by --mix-seed")
    add("--mix-seed", type=int, default=1, metavar="N")
    add("--siblings", type=int, default=1, metavar="N", help="every request comes N times, 10 ms apart")
    add("--event-delay", type=float, nargs=2, default=(0.005, 0.05), metavar=("LOW", "HIGH"), help="seconds")
    add("--report-every", type=float, metavar="S", help="engines report their load; without it they do not")
    add("--report-delay", type=float, metavar="S", help="how old a report is when it comes")
    add(
        "--sibling-delay",
        type=float,
        metavar="MS",
        help="replicas hear of each other's load and placements so late; default: never",
    )
    add("--host-tokens", type=int, default=0, metavar="N", help="host memory tier of each rank; 0: none")
    add("--host-read", type=float, default=150_000, metavar="N", help="tokens a second read back from the host tier")
    add("--prediction-ttl", type=float, default=10.0, metavar="S", help="0: no predicted blocks")
    add("--speeds", type=float, nargs="+", default=(1.0,), metavar="X", help="relative speeds, given to ranks in turn")
    add("--profile", type=Path, metavar="FILE", help="timing of an engine, from bench calibrate")
    add("--json", type=Path, metavar="FILE")
    add("--plot", type=Path, metavar="FILE", help="SVG of TTFT and goodput over load")

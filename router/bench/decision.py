"""`bench decision`: index look-up and policy for one prompt, over fleets of several sizes. This process's CPU time."""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from router.bench.sim.router import SimTarget
from router.contract.events import Tier
from router.hashing import Scheme
from router.index.prefix import PrefixIndex
from router.matching import PromptKeys, prompt_credits
from router.policy.consistent import anchor
from router.policy.cost import CostWeights
from router.policy.decide import Asked, Policy
from router.policy.load import Report
from router.policy.predicted import PredictedBlocks

BLOCKS, WIDTH = 512, 16
RANKS = (64, 1000)
ROUNDS = 200


def run() -> dict[str, Any]:
    """{"blocks", "decisions": [{"ranks", "holders", "match_us", "policy_us", "total_us"}]}; medians."""
    rows = [measure(ranks, holders) for ranks in RANKS for holders in (1, 16, ranks)]
    return {"blocks": BLOCKS, "decisions": rows}


def measure(ranks: int, holders: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Every rank is busy, reports its load and has predicted blocks; `holders` hold 40 to 512 blocks of the prompt."""
    rng, index, scheme = random.Random(1), PrefixIndex(), Scheme("sglang-sha256", WIDTH)
    predicted = PredictedBlocks(ttl_s=10.0)
    prompt = [_key(rng) for _ in range(BLOCKS)]
    targets = [SimTarget(0, index.open_slot(), anchor("", number)) for number in range(ranks)]
    for target in targets:
        index.store(target.credit_slot, Tier.GPU, [_key(rng) for _ in range(100)])
        predicted.add(target.credit_slot, [_key(rng) for _ in range(50)], 0.0)
        for _ in range(3):
            target.account.place(1000, 500, -1.0, 120.0).first_byte()
        target.account.place(1000, 500, -0.5, 120.0)
        target.account.reported(Report(-0.2, 3, 1, 700, (0, 0)))
        target.account.reported(Report(-0.1, 3, 1, 700, (1_000_000, 50_000_000)))
    for target in rng.sample(targets, holders):
        index.store(target.credit_slot, Tier.GPU, prompt[: rng.choice([40, 128, 256, BLOCKS])])
    policy = Policy("kv", CostWeights(), default_rate_tokens_per_s=8000.0, rng=rng)
    keys = PromptKeys.known(scheme, prompt)
    match_us, policy_us, total_us = [], [], []
    for number in range(rounds):
        started = time.process_time_ns()
        credits = prompt_credits(index, predicted, keys, (scheme,))
        matched = time.process_time_ns()
        policy.decide(Asked(BLOCKS * WIDTH + 1, chain=prompt, width=WIDTH), targets, credits, 0.001 * number)
        ended = time.process_time_ns()
        match_us.append((matched - started) / 1000)
        policy_us.append((ended - matched) / 1000)
        total_us.append((ended - started) / 1000)
    return {
        "ranks": ranks,
        "holders": holders,
        "match_us": round(median(match_us), 1),
        "policy_us": round(median(policy_us), 1),
        "total_us": round(median(total_us), 1),
    }


def _key(rng: random.Random) -> int:
    return rng.getrandbits(64) - (1 << 63)


def print_table(result: dict[str, Any], console: Console) -> None:
    """`run`'s result for people."""
    table = Table(title=f"one decision, prompt of {result['blocks']} blocks, µs of CPU (median)")
    for column in ("ranks", "hold a part", "look-up", "policy", "both"):
        table.add_column(column, justify="right")
    for row in result["decisions"]:
        table.add_row(*(f"{row[key]:,}" for key in ("ranks", "holders", "match_us", "policy_us", "total_us")))
    console.print(table)

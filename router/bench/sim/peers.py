"""Other routers' published rules, re-implemented for comparison in the simulation only (shared policy study's table).

Each sees what it would see in its own project: matched tokens per rank from events, its own in-flight accounting, and
the engine's running state at that moment. Constants are those projects' defaults, untuned.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from router.bench.sim.rank import SimRank
from router.policy.load import RankLoad

PREFILL_TOKENS_PER_S = 20_000.0
"""What llm-d's TTFT prediction would have learnt from the study's engine model."""


@dataclass(slots=True)
class Seat:
    """One rank as a peer sees it. `matched_tokens` is of the prompt in question."""

    load: RankLoad
    engine: SimRank
    matched_tokens: int = 0
    active_blocks: Counter[int] = field(default_factory=Counter)
    """Blocks of this router's running requests, shared ones counted."""
    inflight_uncached_tokens: int = 0
    """Of this router's requests, until their last byte."""
    last_cold_at: int = -1
    """Number of the last request without a match that was sent here."""


@dataclass(frozen=True, slots=True)
class Question:
    prompt_tokens: int
    keys: Sequence[int]
    width: int
    number: int


Rule = Callable[[Question, Sequence[Seat], random.Random], int]


def _lowest(values: Sequence[float], rng: random.Random, among: Sequence[int] | None = None) -> int:
    positions = range(len(values)) if among is None else among
    best = min(values[i] for i in positions)
    return rng.choice([i for i in positions if values[i] == best])


def _requests(seats: Sequence[Seat]) -> list[float]:
    return [float(seat.load.requests) for seat in seats]


def _uncached(question: Question, seats: Sequence[Seat]) -> list[int]:
    return [max(1, question.prompt_tokens - seat.matched_tokens) for seat in seats]


def dynamo(question: Question, seats: Sequence[Seat], rng: random.Random) -> int:
    """Prefill blocks to be computed there plus decode blocks active there, this prompt's included."""
    costs = []
    for seat, uncached in zip(seats, _uncached(question, seats), strict=True):
        prefill_blocks = (seat.load.queued_uncached_tokens + uncached) / question.width
        shared = _depth(question.keys, seat.active_blocks)
        costs.append(prefill_blocks + len(seat.active_blocks) + len(question.keys) - shared)
    return _lowest(costs, rng)


def _depth(keys: Sequence[int], held: Counter[int]) -> int:
    """Leading keys that are held; a block is held only with all before it, so halving finds the end."""
    low, high = 0, len(keys)
    while low < high:
        middle = (low + high) // 2
        if keys[middle] in held:
            low = middle + 1
        else:
            high = middle
    return low


def sgl_router(question: Question, seats: Sequence[Seat], rng: random.Random) -> int:
    """sgl-router main: near the best match the deepest, or the least pressured when pressure differs much."""
    pressure = [float(seat.load.queued_uncached_tokens) for seat in seats]
    holders = [i for i, seat in enumerate(seats) if seat.matched_tokens >= 1024]
    if not holders:
        pair = rng.sample(range(len(seats)), min(2, len(seats)))
        return _lowest(pressure, rng, pair)
    best = max(seats[i].matched_tokens for i in holders)
    near = [i for i in holders if best - seats[i].matched_tokens <= 1024]
    low, high = min(pressure[i] for i in near), max(pressure[i] for i in near)
    if high - low > 1024 and high > 1.5 * low:
        return _lowest(pressure, rng, near)
    return _lowest([-seat.matched_tokens for seat in seats], rng, near)


def sglang_legacy(question: Question, seats: Sequence[Seat], rng: random.Random) -> int:
    """sglang cache_aware: least requests when unbalanced, else the deepest match above half of the prompt."""
    requests = _requests(seats)
    low, high = min(requests), max(requests)
    best = max(seat.matched_tokens for seat in seats)
    if (high - low > 32 and high > 1.1 * low) or best <= 0.5 * question.prompt_tokens:
        return _lowest(requests, rng)
    return _lowest([-seat.matched_tokens for seat in seats], rng)


def _llm_d_scores(question: Question, seats: Sequence[Seat]) -> list[float]:
    waiting = [len(seat.engine.waiting) for seat in seats]
    low, span = min(waiting), max(waiting) - min(waiting)
    return [
        3 * seat.matched_tokens / question.prompt_tokens
        + 2 * (1 - seat.engine.kv_used)
        + 2 * (1 - (queue - low) / span if span else 1.0)
        for seat, queue in zip(seats, waiting, strict=True)
    ]


def llm_d(question: Question, seats: Sequence[Seat], rng: random.Random) -> int:
    """llm-d 3/2/2: prefix, KV use, queue."""
    return _lowest([-score for score in _llm_d_scores(question, seats)], rng)


def llm_d_lru(question: Question, seats: Sequence[Seat], rng: random.Random) -> int:
    """The same with the no-hit-LRU scorer: cold requests go where the last cold one was longest ago."""
    scores = _llm_d_scores(question, seats)
    cold = all(seat.matched_tokens == 0 for seat in seats)
    if cold and len(seats) > 1:
        order = sorted(range(len(seats)), key=lambda i: seats[i].last_cold_at)
        for place, position in enumerate(order):
            scores[position] += 2 * (1 - place / (len(seats) - 1))
    chosen = _lowest([-score for score in scores], rng)
    if cold:
        seats[chosen].last_cold_at = question.number
    return chosen


def llm_d_gate(question: Question, seats: Sequence[Seat], rng: random.Random) -> int:
    """Only ranks that hold 80 % of the prompt, unless their predicted TTFT is over 5 s; then least in-flight uncached
    tokens, which llm-d counts until a request's end."""
    queued = [float(seat.load.queued_uncached_tokens) for seat in seats]
    uncached = _uncached(question, seats)
    gate = [
        i
        for i, seat in enumerate(seats)
        if seat.matched_tokens >= 0.8 * question.prompt_tokens
        and (queued[i] + uncached[i]) / PREFILL_TOKENS_PER_S <= 5.0
    ]
    return _lowest([float(seat.inflight_uncached_tokens) for seat in seats], rng, gate or None)


def aibrix(question: Question, seats: Sequence[Seat], rng: random.Random) -> int:
    """Least requests when unbalanced or without a match, else the best match among ranks not too busy."""
    requests = _requests(seats)
    if max(requests) - min(requests) > 16 or all(seat.matched_tokens == 0 for seat in seats):
        return _lowest(requests, rng)
    limit = fmean(requests) + 2 * pstdev(requests)
    calm = [i for i, count in enumerate(requests) if count <= limit]
    best = max(seats[i].matched_tokens for i in calm)
    return _lowest(requests, rng, [i for i in calm if seats[i].matched_tokens == best])


def lmetric(question: Question, seats: Sequence[Seat], rng: random.Random) -> int:
    """This prompt's uncached tokens times in-flight requests."""
    uncached = _uncached(question, seats)
    return _lowest([tokens * (seat.load.requests + 1) for tokens, seat in zip(uncached, seats, strict=True)], rng)


def trt_llm(question: Question, seats: Sequence[Seat], rng: random.Random) -> int:
    """Highest match fraction less in-flight requests over 64."""
    return _lowest(
        [seat.load.requests / 64 - seat.matched_tokens / question.prompt_tokens for seat in seats],
        rng,
    )


PEERS: dict[str, Rule] = {
    "dynamo": dynamo,
    "dynamo-predict": dynamo,
    "sgl-router": sgl_router,
    "sglang-legacy": sglang_legacy,
    "llm-d": llm_d,
    "llm-d-lru": llm_d_lru,
    "llm-d-gate": llm_d_gate,
    "aibrix": aibrix,
    "lmetric": lmetric,
    "trt-llm": trt_llm,
}
PREDICTION_S = {"dynamo-predict": 5.0}
"""Peers that count a prompt just routed as resident, and for how long."""

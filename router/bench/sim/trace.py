"""Request traces for the simulation: who came when, with which prefix. Equal block keys mean equal prefixes."""

from __future__ import annotations

import json
import lzma
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from router.errors import ConfigError

BUCKET_LIMIT_S = 10.0
"""Equal timestamps are spread up to the next distinct one, but never over more than this."""
SESSION_KEYS = 1 << 20
"""Block ids of one packed session stay below this; sessions share no blocks (hash_id_scope local)."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`keys` has one entry a block of the prompt, in order; the last may stand for a partial block."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order they came. `width`: tokens a block."""

    name: str
    width: int
    requests: tuple[TraceRequest, ...]


def load_trace(path: Path, *, seed: int = 1, sessions: int = 64) -> Trace:
    """A Mooncake trace (jsonl, also .xz) as it is, or packed agentic sessions, of which `sessions` are mixed by `seed`.

    Raises ConfigError for a file that is neither.
    """
    try:
        with _open(path) as file:
            first = json.loads(file.readline())
            records = [first, *(json.loads(line) for line in file if line.strip())]
        if "hash_ids" in first:
            return _mooncake(path.name, records)
        if "requests" in first:
            return mix_sessions(path.name, records, seed=seed, count=sessions)
    except (OSError, lzma.LZMAError) as error:
        raise ConfigError(f"--trace {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--trace {path}: not a trace: {type(error).__name__}: {error}") from None
    raise ConfigError(f"--trace {path}: neither a Mooncake trace (hash_ids) nor packed sessions (requests)")


def _open(path: Path) -> TextIO:
    return lzma.open(path, "rt") if path.suffix == ".xz" else path.open(encoding="utf-8")


def _mooncake(name: str, records: Sequence[dict[str, Any]]) -> Trace:
    requests = [
        TraceRequest(r["timestamp"] / 1000, r["input_length"], max(1, r["output_length"]), tuple(r["hash_ids"]))
        for r in records
        if r["hash_ids"]
    ]
    return Trace(name, _width(requests), tuple(sorted(requests, key=lambda r: r.at_s)))


def _width(requests: Sequence[TraceRequest]) -> int:
    """The one power of two for which every request has all its blocks, the last partial one with or without an id."""
    longest = max(requests, key=lambda r: len(r.keys))
    guess = 1 << round(math.log2(longest.prompt_tokens / len(longest.keys)))
    if any(len(r.keys) not in (r.prompt_tokens // guess, -(-r.prompt_tokens // guess)) for r in requests):
        raise ValueError(f"hash_ids do not fit blocks of {guess} tokens")
    return guess


def mix_sessions(
    name: str,
    records: Sequence[dict[str, Any]],
    *,
    seed: int,
    count: int,
    window_s: float = 600.0,
    gap_cap_s: float = 60.0,
    peak_tokens: int = 131_072,
) -> Trace:
    """`count` sessions drawn by `seed`, started uniformly in `window_s`, pauses capped; long sessions are left out."""
    rng = random.Random(seed)
    fitting = [r for r in records if (calls := _calls(r)) and all(call["in"] <= peak_tokens for call in calls)]
    requests: list[TraceRequest] = []
    for number, record in enumerate(rng.sample(fitting, min(count, len(fitting)))):
        at_s = rng.uniform(0, window_s)
        calls = _calls(record)
        before_s = calls[0]["t"]
        for call in calls:
            at_s += min(call["t"] - before_s, gap_cap_s)
            before_s = call["t"]
            keys = tuple(
                number * SESSION_KEYS + key for start, n in call["hash_runs"] for key in range(start, start + n)
            )
            if keys:
                requests.append(TraceRequest(at_s, call["in"], max(1, call["out"]), keys))
    width = int(records[0]["block_size"])
    return Trace(f"{name} mix {seed}", width, tuple(sorted(requests, key=lambda r: r.at_s)))


def _calls(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Every model call of a session and of its sub-agents, by time."""
    return sorted(_flat(record["requests"], 0.0), key=lambda call: call["t"])


def _flat(requests: Sequence[dict[str, Any]], offset_s: float) -> Iterator[dict[str, Any]]:
    for request in requests:
        if "requests" in request:
            yield from _flat(request["requests"], offset_s + request["t"])
        elif "hash_runs" in request:
            yield {**request, "t": request["t"] + offset_s}


def spread(trace: Trace, rng: random.Random) -> Trace:
    """Requests that share a timestamp (recorded in buckets) are spread until the next one, in their order."""
    times = [r.at_s for r in trace.requests]
    spread_s: list[float] = []
    position = 0
    while position < len(times):
        end = position
        while end < len(times) and times[end] == times[position]:
            end += 1
        gap_s = min(times[end] - times[position], BUCKET_LIMIT_S) if end < len(times) else 0.0
        count = end - position
        offsets = sorted(rng.uniform(0, gap_s) for _ in range(count)) if count > 1 else [0.0]
        spread_s += [times[position] + offset for offset in offsets]
        position = end
    moved = tuple(replace(r, at_s=at_s) for r, at_s in zip(trace.requests, spread_s, strict=True))
    return Trace(trace.name, trace.width, moved)


def siblings(trace: Trace, count: int, gap_s: float) -> Trace:
    """Every request `count` times, `gap_s` apart: the same prompt asked at once by several agents."""
    many = [replace(r, at_s=r.at_s + i * gap_s) for r in trace.requests for i in range(count)]
    return Trace(trace.name, trace.width, tuple(sorted(many, key=lambda r: r.at_s)))


def ideal_hit_rate(trace: Trace, *, second_half: bool = False) -> float:
    """Share of prompt tokens that one unbounded cache with instant service would have had."""
    seen: set[int] = set()
    hit = total = 0
    for number, request in enumerate(trace.requests):
        depth = 0
        while depth < len(request.keys) and request.keys[depth] in seen:
            depth += 1
        if not second_half or number >= len(trace.requests) // 2:
            hit += min(depth * trace.width, request.prompt_tokens)
            total += request.prompt_tokens
        seen.update(request.keys)
    return hit / total

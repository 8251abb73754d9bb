"""What one policy's phase of the demo measured, and its JSON shape (interface.md). Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


@dataclass(slots=True)
class PhaseStats:
    """Requests that were answered count; prompt and cached tokens are as the engines reported them."""

    policy: str
    requests: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    predicted_cached_tokens: int = 0
    ideal_hit_rate: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    per_worker: dict[str, int] = field(default_factory=dict)
    first_error: str = ""
    rooms: dict[str, int] = field(default_factory=dict)
    """Of a split fleet: how its hand-overs went (router.engine.rooms)."""

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def mean_ttft_s(self) -> float:
        return sum(self.ttft_s) / len(self.ttft_s) if self.ttft_s else math.nan

    def as_json(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "hit_rate": round(self.hit_rate, 4),
            "predicted_cached_tokens": self.predicted_cached_tokens,
            "unbounded_cache_hit_rate": round(self.ideal_hit_rate, 4),
            "requests_by_worker": self.per_worker,
            **({"rooms": self.rooms} if any(self.rooms.values()) else {}),
            "ttft_s": {
                "mean": _rounded(self.mean_ttft_s),
                **{f"p{share}": _rounded(percentile(self.ttft_s, share / 100)) for share in (50, 90, 99)},
            },
        }


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def met_once(phase: PhaseStats) -> tuple[str, bool]:
    """Every request's pair met in its room, exactly once, and no engine got traffic without one."""
    rooms, asked = phase.rooms, phase.requests + phase.errors
    good = rooms["met"] == asked and not (rooms["failed"] or rooms["reused"] or rooms["refused"])
    return f"{phase.policy}: {rooms['met']} of {asked} pairs met in their room once", good


def findings(kv: PhaseStats, round_robin: PhaseStats) -> list[tuple[str, bool]]:
    """What the demo claims, each with whether this run bears it out."""
    kv_p50, kv_p99 = percentile(kv.ttft_s, 0.5), percentile(kv.ttft_s, 0.99)
    rr_p50, rr_p99 = percentile(round_robin.ttft_s, 0.5), percentile(round_robin.ttft_s, 0.99)
    share = kv.hit_rate / kv.ideal_hit_rate if kv.ideal_hit_rate else 0.0
    times = kv.hit_rate / round_robin.hit_rate if round_robin.hit_rate else math.inf
    return [
        (f"KV-aware reaches {share:.0%} of one unbounded cache's hit rate (at least 90 %)", share >= 0.9),
        (f"KV-aware's hit rate is {times:.1f} × round-robin's (at least 2)", times >= 2),
        (f"TTFT p50 {kv_p50 * 1e3:.0f} ms against {rr_p50 * 1e3:.0f} ms", kv_p50 < rr_p50),
        (f"TTFT p99 {kv_p99 * 1e3:.0f} ms against {rr_p99 * 1e3:.0f} ms", kv_p99 < rr_p99),
        (f"{kv.errors + round_robin.errors} errors", kv.errors + round_robin.errors == 0),
    ]

"""Ten minutes of the whole router in small steps, so that a page that is opened shows curves at once. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple

from router.observe.tally import Tally

STEP_S = 2.0
POINTS = 300
FIELDS = (
    "at",
    "requests",
    "failed",
    "prompt",
    "predicted",
    "best",
    "blind",
    "reported_prompt",
    "reported_cached",
    "ttft_p50_s",
    "ttft_p95_s",
)
"""What the numbers of a point are: Unix time, then counts and tokens since the point before, then quantiles."""

Point = list[float | None]


class History:
    """A bounded ring of points."""

    def __init__(self) -> None:
        self._points: deque[Point] = deque(maxlen=POINTS)
        self._before: tuple[float, ...] = astuple(Tally())
        self._failed = 0

    def sample(self, at_s: float, tally: Tally, failed: int, ttfts_s: Sequence[float]) -> Point:
        """`ttfts_s`: sorted, of the requests that finished since the last sample; `failed`: a running total."""
        now = astuple(tally)
        grown: list[float | None] = [new - old for new, old in zip(now, self._before, strict=True)]
        point: Point = [round(at_s, 3), grown[0], failed - self._failed, *grown[1:]]
        point[6] = round(now[4] - self._before[4], 1)
        self._before, self._failed = now, failed
        point += [_quantile(ttfts_s, 0.5), _quantile(ttfts_s, 0.95)]
        self._points.append(point)
        return point

    def points(self) -> list[Point]:
        return list(self._points)


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """Nearest rank; None of nothing."""
    return round(ordered[max(0, math.ceil(share * len(ordered)) - 1)], 5) if ordered else None

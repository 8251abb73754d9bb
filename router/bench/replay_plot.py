"""TTFT and goodput over load as one SVG file, written by hand: two panels, a line a policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

Curve = Sequence[tuple[float, float, float]]
"""(time factor, mean TTFT s, goodput) by rising time factor."""

WIDTH, HEIGHT = 460, 320
LEFT, TOP, RIGHT, BOTTOM = 60, 40, 20, 45
COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e5ea2", "#e09f3e", "#5c6b73", "#00798c", "#9a6324", "#d45087", "#444444")


def plot(title: str, curves: Mapping[str, Curve]) -> str:
    """The SVG's text. TTFT is drawn on a logarithmic axis."""
    points = [point for curve in curves.values() for point in curve]
    loads = [point[0] for point in points]
    ttfts = [point[1] for point in points]
    x = _scale(min(loads), max(loads), LEFT, WIDTH - RIGHT)
    low, high = math.floor(math.log10(min(ttfts))), math.ceil(math.log10(max(ttfts)))
    high = max(high, low + 1)
    log_y = _scale(low, high, HEIGHT - BOTTOM, TOP)
    share_y = _scale(0.0, 1.0, HEIGHT - BOTTOM, TOP)
    decades = [(10.0**power, f"{10.0**power:g}") for power in range(low, high + 1)]
    shares = [(step / 5, f"{step / 5:g}") for step in range(6)]
    panels = [
        _panel(
            0,
            "mean TTFT, s",
            curves,
            x,
            lambda point: log_y(math.log10(point[1])),
            [(log_y(math.log10(value)), label) for value, label in decades],
        ),
        _panel(
            WIDTH,
            "goodput (TTFT < 2 s, TPOT < 50 ms)",
            curves,
            x,
            lambda point: share_y(point[2]),
            [(share_y(value), label) for value, label in shares],
        ),
    ]
    height = HEIGHT + 20 * len(curves)
    legend = [
        f'<line x1="{LEFT}" x2="{LEFT + 24}" y1="{HEIGHT + 8 + 20 * i}" y2="{HEIGHT + 8 + 20 * i}" '
        f'stroke="{_colour(i)}" stroke-width="2"/>'
        f'<text x="{LEFT + 32}" y="{HEIGHT + 12 + 20 * i}">{escape(name)}</text>'
        for i, name in enumerate(curves)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{height}" '
            'font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="{LEFT}" y="18" font-weight="bold">{escape(title)}</text>',
            *panels,
            *legend,
            "</svg>\n",
        ]
    )


def _panel(
    offset: int,
    title: str,
    curves: Mapping[str, Curve],
    x: Callable[[float], float],
    y: Callable[[tuple[float, float, float]], float],
    ticks: Sequence[tuple[float, str]],
) -> str:
    parts = [f'<g transform="translate({offset},0)"><text x="{LEFT}" y="34">{escape(title)}</text>']
    for at, label in ticks:
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for load in sorted({point[0] for curve in curves.values() for point in curve}):
        parts.append(f'<text x="{x(load):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{load:.3g}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">load (time factor)</text>')
    for number, curve in enumerate(curves.values()):
        path = " ".join(f"{x(point[0]):.1f},{y(point):.1f}" for point in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(number)}" stroke-width="2"/>')
    return "".join([*parts, "</g>"])


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]

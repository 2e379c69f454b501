"""Draws a chart as an SVG element for a page, with nothing but text."""

from __future__ import annotations

import math
from html import escape

from baton_loadtest.report import Chart, number

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 30, 62
COLORS = ("#1f6feb", "#d1482f", "#2b8a3e", "#8250df", "#9a6700", "#57606a")
TICKS = 5


def svg(chart: Chart) -> str:
    """Both axes begin at 0. A chart of no points says so."""
    points = [(x, y) for line in chart.lines for x, y in zip(line.x, line.y, strict=True)]
    head = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">'
        f'<text class="title" x="{LEFT}" y="18">{escape(chart.title)}</text>'
    )
    if not points:
        return f'{head}<text x="{LEFT}" y="{HEIGHT / 2}">nothing to show</text></svg>'
    right = _nice(max(x for x, _ in points))
    top = _nice(max(y for _, y in points))
    parts = [head]
    for n in range(TICKS + 1):
        x, y = _x(right * n / TICKS, right), _y(top * n / TICKS, top)
        parts += [
            f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>',
            f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">'
            f"{number(top * n / TICKS)}</text>",
            f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}">'
            f"{number(right * n / TICKS)}</text>",
        ]
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts += [
        f'<text class="tick" text-anchor="middle" x="{(LEFT + WIDTH - RIGHT) / 2}" '
        f'y="{HEIGHT - BOTTOM + 32}">{escape(chart.x_label)}</text>',
        f'<text class="tick" text-anchor="middle" transform="translate(14 {middle}) rotate(-90)">'
        f"{escape(chart.y_label)}</text>",
    ]
    for n, line in enumerate(chart.lines):
        color = COLORS[n % len(COLORS)]
        path = " ".join(
            f"{_x(x, right):.1f},{_y(y, top):.1f}" for x, y in zip(line.x, line.y, strict=True)
        )
        place = LEFT + n * (WIDTH - LEFT) / max(3, len(chart.lines))
        parts += [
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>',
            f'<rect x="{place:.1f}" y="{HEIGHT - 18}" width="12" height="4" fill="{color}"/>',
            f'<text class="tick" x="{place + 16:.1f}" y="{HEIGHT - 12}">{escape(line.name)}</text>',
        ]
    return "".join([*parts, "</svg>"])


def _nice(most: float) -> float:
    """At least `most`, and a fifth of it is short to write."""
    if most <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(most))
    return next((unit * n for n in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if unit * n >= most), unit * 10)


def _x(value: float, right: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * value / right


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top

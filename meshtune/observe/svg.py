"""A small line chart as inline SVG: no script, no font, no colour of its own (the page's style sheet has
them)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from meshtune.observe.history import Point

NARROW, WIDE = 560, 1140
_HEIGHT = 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 10, 30
_MOST_POINTS = 800


@dataclass(frozen=True)
class Series:
    """One curve: `raw` is drawn thin and pale, `line` strong, `marks` with a dot on each point."""

    label: str
    points: Sequence[Point]
    style: Literal["raw", "line", "marks"]


@dataclass(frozen=True)
class _Frame:
    """Where the curves lie: ranges of steps and values, in a picture of `width` pixels."""

    steps: tuple[float, float]
    values: tuple[float, float]
    width: int
    text_of: Callable[[float], str]

    def x(self, step: float) -> str:
        return _placed(step, self.steps, _LEFT, self.width - _RIGHT)

    def y(self, value: float) -> str:
        return _placed(value, self.values, _HEIGHT - _BOTTOM, _TOP)


def line_chart(title: str, series: Sequence[Series], text_of: Callable[[float], str], width: int = NARROW) -> str:
    """The chart of `series` over optimizer steps, or a sentence where there is nothing to draw.

    `text_of` writes a value at the axis; `width` in pixels is about that of the place where the chart is
    shown."""
    known = [(x, y) for one in series for x, y in one.points if y is not None and math.isfinite(y)]
    if not known:
        return '<p class="empty">Nothing logged yet.</p>'
    steps = _widened([x for x, _ in known], margin=1.0)
    values = _ticks(*_widened([y for _, y in known]))
    frame = _Frame(steps, (values[0], values[-1]), width, text_of)
    parts = [f'<svg viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{escape(title)}, by optimizer step">']
    parts += _axes(frame, [tick for tick in _ticks(*steps, narrowest=1.0) if steps[0] <= tick <= steps[1]], values)
    parts += [_curve(one, frame) for one in series]
    return "\n".join([*parts, "</svg>"])


def _axes(frame: _Frame, steps: Sequence[float], values: Sequence[float]) -> list[str]:
    bottom = _HEIGHT - 10
    parts = [f'<text class="tick" x="{_LEFT - 8}" y="{bottom}" text-anchor="end">step</text>']
    for value in values:
        y, text = frame.y(value), frame.text_of(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{frame.width - _RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 8}" y="{y}" dy=".32em" text-anchor="end">{text}</text>')
    for step in steps:
        place = f'x="{frame.x(step)}" y="{bottom}" text-anchor="middle"'
        parts.append(f'<text class="tick" {place}>{step:,.0f}</text>')
    return parts


def _curve(one: Series, frame: _Frame) -> str:
    runs = _unbroken(thinned(one.points))
    lines = [
        f'<polyline points="{" ".join(f"{frame.x(x)},{frame.y(y)}" for x, y in run)}"/>' for run in runs if len(run) > 1
    ]
    dots = [
        f'<circle cx="{frame.x(x)}" cy="{frame.y(y)}" r="3"><title>step {x:,.0f}: {frame.text_of(y)}</title></circle>'
        for run in runs
        for x, y in run
        if one.style == "marks" or len(run) == 1
    ]
    return f'<g class="series {one.style}">{"".join(lines + dots)}</g>'


def thinned(values: Sequence[Point]) -> list[Point]:
    """At most `_MOST_POINTS` points that keep the lowest and the highest of each stretch, so that a spike
    stays."""
    if len(values) <= _MOST_POINTS:
        return list(values)
    width = math.ceil(len(values) / (_MOST_POINTS // 2))
    kept: list[Point] = []
    for start in range(0, len(values), width):
        stretch = [(x, y) for x, y in values[start : start + width] if y is not None]
        if not stretch:
            kept.append((values[start][0], None))
            continue
        extremes = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(extremes)
    return kept


def _unbroken(values: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """Cut the curve where a value is unknown."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in values:
        if y is None or not math.isfinite(y):
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def _placed(value: float, span: tuple[float, float], start: float, end: float) -> str:
    share = (value - span[0]) / (span[1] - span[0])
    return f"{start + share * (end - start):.1f}"


def _widened(values: Sequence[float], margin: float | None = None) -> tuple[float, float]:
    """Lowest and highest value; where they are the same, room on both sides of it."""
    low, high = min(values), max(values)
    if high > low:
        return low, high
    room = margin or abs(low) * 0.1 or 1.0
    return low - room, high + room


def _ticks(low: float, high: float, narrowest: float = 0.0) -> list[float]:
    """Round values at steps of 1, 2 or 5 times a power of ten that enclose `low` to `high`."""
    raw = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    width = max(narrowest, width)
    first, last = math.floor(low / width + 1e-9), math.ceil(high / width - 1e-9)
    return [number * width for number in range(first, max(last, first + 1) + 1)]

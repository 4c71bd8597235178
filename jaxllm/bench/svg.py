"""Line charts as SVG, for the curves of a benchmark, without a plotting package."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#475569")
_WIDTH, _HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 34, 48


class Line(NamedTuple):
    label: str
    x: Sequence[float]
    y: Sequence[float]


class Mark(NamedTuple):
    """A vertical line, such as a percentile."""

    label: str
    x: float


class Chart(NamedTuple):
    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()


def draw(charts: Sequence[Chart], columns: int = 2) -> str:
    """Draw charts side by side in one SVG document."""
    columns = min(columns, len(charts))
    rows = -(-len(charts) // columns)
    width, height = columns * _WIDTH, rows * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for i, chart in enumerate(charts):
        x, y = i % columns * _WIDTH, i // columns * _HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_draw(chart), "</g>"]
    return "\n".join([*parts, "</svg>\n"])


def ticks(most: float) -> list[float]:
    """About five round numbers from 0 to at least the largest value."""
    if not most > 0:
        return [0.0, 1.0]
    raw = most / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.9999)
    return [i * step for i in range(math.ceil(most / step * 0.9999) + 1)]


def _draw(chart: Chart) -> list[str]:
    xs = [x for line in chart.lines for x in line.x] + [mark.x for mark in chart.marks]
    ys = [y for line in chart.lines for y in line.y]
    x_ticks, y_ticks = ticks(max(xs, default=0)), ticks(max(ys, default=0))
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT

    def px(x: float) -> float:
        return round(_LEFT + x / x_ticks[-1] * (right - _LEFT), 2)

    def py(y: float) -> float:
        return round(bottom - y / y_ticks[-1] * (bottom - _TOP), 2)

    parts = [_text(_LEFT, 18, chart.title, weight="bold")]
    for y in y_ticks:
        parts.append(f'<path d="M{_LEFT} {py(y)}H{right}" stroke="#e5e7eb"/>')
        parts.append(_text(_LEFT - 6, py(y) + 4, f"{y:g}", anchor="end"))
    for x in x_ticks:
        parts.append(f'<path d="M{px(x)} {bottom}v4" stroke="#6b7280"/>')
        parts.append(_text(px(x), bottom + 16, f"{x:g}", anchor="middle"))
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#6b7280"/>')
    parts.append(_text((_LEFT + right) / 2, bottom + 34, chart.x_label, anchor="middle"))
    parts.append(
        f'<g transform="translate(14 {(_TOP + bottom) / 2}) rotate(-90)">'
        + _text(0, 0, chart.y_label, anchor="middle")
        + "</g>"
    )
    for mark in chart.marks:
        parts.append(
            f'<path d="M{px(mark.x)} {_TOP}V{bottom}" stroke="#9ca3af" stroke-dasharray="3 3"/>'
        )
        parts.append(_text(px(mark.x) + 3, _TOP + 10, mark.label))
    for i, line in enumerate(chart.lines):
        colour = _COLOURS[i % len(_COLOURS)]
        points = [(px(x), py(y)) for x, y in zip(line.x, line.y, strict=True)]
        if len(set(points)) == 1:  # a line without length would be invisible
            parts.append(f'<circle cx="{points[0][0]}" cy="{points[0][1]}" r="3" fill="{colour}"/>')
        joined = " ".join(f"{x},{y}" for x, y in points)
        parts.append(
            f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        if len(chart.lines) > 1:
            y = _TOP + 14 + 14 * i
            parts.append(
                f'<path d="M{right - 110} {y - 4}h14" stroke="{colour}" stroke-width="2"/>'
            )
            parts.append(_text(right - 92, y, line.label))
    return parts


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}" fill="#111827">'
        f"{escape(text)}</text>"
    )

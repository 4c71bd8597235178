"""Draws the log of a training run as SVG: loss of the text, and held-out bits per byte.

python benchmarks/loss_curve.py RUN/log.jsonl curve.svg
"""

import argparse
import json
import math
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 320, 50, 50, 24, 36
LOSS, HELDOUT = "#4472a8", "#c0504d"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("svg", type=Path)
    args = parser.parse_args()
    records = [json.loads(line) for line in args.log.read_text().splitlines()]
    args.svg.write_text(draw(records), encoding="utf-8")


def draw(records: list[dict[str, float]]) -> str:
    """Draw the loss as a running mean over a hundredth of the run; a dot is a single step."""
    last = records[-1]["step"]
    loss = [(r["step"], r["loss"]) for r in records]
    heldout = [
        (r["step"], r["heldout_bits_per_byte"]) for r in records if "heldout_bits_per_byte" in r
    ]
    # Both axes begin at zero, so that heights are proportional to values.
    top_loss = math.ceil(max(value for _, value in loss))
    top_heldout = math.ceil(max(value for _, value in heldout))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for value in range(top_loss + 1):
        y = _y(value, top_loss)
        parts += [
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>',
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="{LOSS}">{value}</text>',
        ]
    for value in range(top_heldout + 1):
        y = _y(value, top_heldout) + 4
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{y:.1f}" fill="{HELDOUT}">{value}</text>')
    parts += [
        f'<circle cx="{_x(step, last):.1f}" cy="{_y(value, top_loss):.1f}" r="0.8" '
        f'fill="{LOSS}" opacity="0.35"/>'
        for step, value in loss
    ]
    parts += [
        _line(_smooth(loss, max(1, len(loss) // 100)), last, top_loss, LOSS),
        _line(heldout, last, top_heldout, HELDOUT),
        f'<text x="{LEFT}" y="14" fill="{LOSS}">loss, nats per token (training text)</text>',
        f'<text x="{WIDTH - RIGHT}" y="14" text-anchor="end" fill="{HELDOUT}">'
        "bits per byte (held-out text)</text>",
        f'<text x="{LEFT}" y="{HEIGHT - 10}">step 0</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">step {last}</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _smooth(points: list[tuple[float, float]], size: int) -> list[tuple[float, float]]:
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(group[-1][0], sum(v for _, v in group) / len(group)) for group in groups]


def _line(points: list[tuple[float, float]], last: float, top: float, colour: str) -> str:
    path = "L".join(f"{_x(step, last):.1f} {_y(value, top):.1f}" for step, value in points)
    return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _x(step: float, last: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * step / last


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / top


if __name__ == "__main__":
    main()

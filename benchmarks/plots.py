"""Draws the records that --out has written: a chart for each benchmark.

    python benchmarks/plots.py benchmarks/results/*.jsonl --into benchmarks/results

A chart has a bar for each row of a benchmark's last record; rows of several engines are adjacent.
"""

import argparse
import json
from html import escape
from pathlib import Path

# For each benchmark: the label of a row, and the metrics that are drawn.
DRAWN = {
    "offline": (("scenario", "engine"), {"tokens_per_s": "output tokens per second"}),
    "latency": (
        ("batch", "context", "engine"),
        {"first_token_ms": "ms to the first token", "per_token_ms": "ms per token"},
    ),
    "serve": (
        ("rate", "engine"),
        {"output_throughput": "output tokens per second", "mean_ttft_ms": "ms to the first token"},
    ),
    "startup": (("what",), {"s": "seconds", "cpu_s": "CPU seconds"}),
    "frontend": (
        ("what",),
        {
            "client_tokens_per_cpu_s": "tokens per CPU second of the client",
            "frontend_pieces_per_cpu_s": "pieces per CPU second of the frontend",
        },
    ),
}
_COLOURS = ("#2563eb", "#d97706", "#059669", "#7c3aed")
_WIDTH, _LABEL, _BAR, _HEAD = 760, 280, 22, 44


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, default=Path())
    args = parser.parse_args()
    last = {}
    for path in args.files:
        for line in path.read_text(encoding="utf-8").splitlines():
            found = json.loads(line)
            last[found["benchmark"]] = found
    for name, found in last.items():
        if name in DRAWN:
            path = args.into / f"{name}.svg"
            path.write_text(draw(found), encoding="utf-8")
            print(path)


def draw(found: dict) -> str:
    """Draw a record as an SVG document."""
    keys, figures = DRAWN[found["benchmark"]]
    parts, y = [], 24
    foot = f"{found['date']}, {found['commit']}, {found['hardware']}"
    for figure, unit in figures.items():
        rows = [row for row in found["rows"] if figure in row]
        longest = max((row[figure] for row in rows), default=1.0)
        parts.append(_text(8, y, f"{found['benchmark']}: {unit}", "bold"))
        y += 10
        for row in rows:
            label = ", ".join(str(row[key]) for key in keys)
            engines = sorted({str(one.get("engine")) for one in rows})
            colour = _COLOURS[engines.index(str(row.get("engine"))) % len(_COLOURS)]
            width = round(row[figure] / longest * (_WIDTH - _LABEL - 90), 1)
            parts.append(_text(8, y + 14, label))
            parts.append(
                f'<rect x="{_LABEL}" y="{y + 3}" width="{width}" height="{_BAR - 6}" '
                f'fill="{colour}"/>'
            )
            parts.append(_text(_LABEL + width + 6, y + 14, f"{row[figure]:,.4g}"))
            y += _BAR
        y += _HEAD - 10
    parts.append(_text(8, y - 12, foot))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{y}" fill="white"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}">{escape(text)}</text>'


if __name__ == "__main__":
    main()

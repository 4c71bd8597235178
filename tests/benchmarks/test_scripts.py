"""Benchmarks start, and what they file can be drawn."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ["connections", "frontend", "latency", "offline", "plots", "serve", "startup"]


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, BENCHMARKS / f"{script}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_it_measures(script):
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    headline = (BENCHMARKS / f"{script}.py").read_text().splitlines()[0].removeprefix('"""')
    assert headline[:40] in done.stdout


def test_the_last_record_of_each_benchmark_is_drawn(tmp_path):
    def record(date, tokens_per_s):
        rows = [
            {"scenario": "s1", "engine": "jaxllm", "tokens_per_s": tokens_per_s},
            {"scenario": "s1", "engine": "a <peer>", "tokens_per_s": 5.0},
        ]
        about = {"date": date, "commit": "abc", "hardware": "2 cores"}
        return json.dumps({"benchmark": "offline", "rows": rows, **about})

    path = tmp_path / "records.jsonl"
    path.write_text("\n".join([record("2026-01-01", 1.0), record("2026-01-02", 20.0)]) + "\n")
    done = run("plots", path, "--into", tmp_path)
    assert done.returncode == 0, done.stderr
    root = ET.parse(tmp_path / "offline.svg").getroot()
    texts = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"s1, jaxllm", "s1, a <peer>", "20", "5"} <= texts
    assert any(text.startswith("2026-01-02") for text in texts)
    bars = [float(rect.get("width")) for rect in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert bars[1] == pytest.approx(4 * bars[2], rel=0.01)

"""Benchmarks start, and what they file can be drawn."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [
    "attention_bounds",
    "connections",
    "frontend",
    "h200",
    "latency",
    "logprobs",
    "offline",
    "plots",
    "predict",
    "quality",
    "recurrent_tpu",
    "replicas",
    "sampler",
    "self_attention_bounds",
    "serve",
    "startup",
    "step_device_time",
    "structured",
]


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, BENCHMARKS / f"{script}.py", *map(str, arguments)],
        capture_output=True,
        text=True,
    )


# All in one process, as each would begin.
HELP = """
import contextlib, io, json, runpy, sys

folder, *scripts = sys.argv[1:]
sys.path[0] = folder
said = {}
for script in scripts:
    sys.argv = [f"{folder}/{script}.py", "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            said[script] = [end.code, out.getvalue()]
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def helps():
    """The exit status and the help of each script."""
    command = [sys.executable, "-c", HELP, str(BENCHMARKS), *SCRIPTS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_it_measures(helps, script):
    status, said = helps[script]
    assert status == 0
    headline = (BENCHMARKS / f"{script}.py").read_text().splitlines()[0].removeprefix('"""')
    assert headline[:40] in said


def test_the_host_takes_every_step_of_every_request():
    done = run("step_host_time", "--requests", 9, "--waiting", 2, "--running", 4, "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["results"]
    assert result["requests"] == 9 and result["lines"]


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


def test_floors_of_an_8b_on_an_h200(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import floors
    import h200

    shape = h200.SHAPES["llama-3.1-8b"]
    line = floors.of_llama(shape.config, "bfloat16", floors.ceilings(shape.ceilings))
    # 6.98 billion weights in the layers and 0.525 in the head; a token's KV takes 131,072 bytes.
    assert floors.decode_s(line, 1, 0) == pytest.approx(2 * 7.505e9 / 4.3e12, rel=1e-3)
    assert floors.decode_s(line, 64, 1024) == pytest.approx(5.49e-3, rel=1e-3)
    gemm, attention = 2 * 6.98e9 * 8192, 32 * 4 * 32 * 128 * 8192 * 8193 / 2
    assert floors.prefill_s(line, 8192) == pytest.approx((gemm + attention) / 790e12, rel=2e-3)
    decodes = 1000 * floors.decode_s(line, 256, 1500)
    prompts = 256 * floors.prefill_s(line, 1000)
    assert floors.serial_s(line, 256, 1000, 1000) == pytest.approx(decodes + prompts)


@pytest.mark.slow
def test_all_of_an_h200_goes_on_where_it_stopped(tmp_path):
    out = tmp_path / "records.jsonl"

    def run_h200(*arguments):
        done = run("h200", "--shape", "tiny", "--commit", "abc", "--out", out, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # No vLLM is there: it fails, and what comes after it runs all the same.
    chosen = ("--vllm-python", tmp_path / "none", "--only", "prefill-vllm,device,start-up")
    first = run_h200(*chosen, "--profile", tmp_path / "traces")
    assert "prefill-vllm: failed" in first
    assert "device: done" in first
    record, start_up = map(json.loads, out.read_text().splitlines())
    assert record["label"] == "tiny device abc"
    assert start_up["rows"][0]["start_up_s"] > 0
    assert "start-up, programs compiled: s" in first
    assert {row["what"] for row in record["rows"]} == {"decode", "prefill"}
    assert all(row["ms"] > 0 and row["share"] > 0 for row in record["rows"])
    assert "decode, 8 x 64: device, ms" in first

    again = run_h200("--only", "device,saturated", "--minutes", "0")
    assert "device: is in" in again
    assert "saturated: dropped" in again
    assert "decode, 8 x 64: device, ms" in again

"""`jaxllm bench` as a user runs it, on a real server and real engines."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # engines are started


def bench(*argv, status=0):
    command = [sys.executable, "-m", "jaxllm.cli.main", "bench", *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


def test_serve(server_port, tiny_model, tmp_path):
    done = bench(
        "serve", "--port", server_port, "--tokenizer", tiny_model, "--num-prompts", 12,
        "--input-len", 20, "--output-len", 8, "--ignore-eos", "--request-rate", 50,
        "--max-concurrency", 4, "--goodput", "e2el:60000", "--save-detailed", "--result-dir",
        tmp_path, "--result-filename", "r.json", "--plot", tmp_path / "r.svg",
        "--metadata", "note=a test", "--percentile-metrics", "ttft,e2el",
    )  # fmt: skip
    assert "Time to first token (ms)" in done.stdout
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["errors"]) == (12, 0, [""] * 12)
    assert result["output_lens"] == [8] * 12
    assert result["total_output_tokens"] == 96
    assert result["total_input_tokens"] == sum(result["input_lens"])
    assert result["output_throughput"] == pytest.approx(96 / result["duration"])
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert 1 <= result["max_concurrent_requests"] <= 4
    assert result["request_rate"] == 50.0
    assert result["note"] == "a test"
    for ttft, itl in zip(result["ttfts"], result["itls"], strict=True):
        assert ttft > 0
        assert len(itl) <= 7
    assert 0 < result["median_ttft_ms"] < result["p99_e2el_ms"]
    assert (tmp_path / "r.svg").read_text().startswith("<svg")


def test_serve_chat_with_other_fields(server_port, tiny_model, tmp_path):
    bench(
        "serve", "--backend", "openai-chat", "--port", server_port, "--tokenizer", tiny_model,
        "--num-prompts", 3, "--input-len", 20, "--output-len", 5, "--save-result",
        "--extra-body", '{"ignore_eos": true, "min_tokens": 5}', "--result-dir", tmp_path,
    )  # fmt: skip
    [path] = tmp_path.iterdir()
    assert path.name.startswith("openai-chat-infqps-")
    result = json.loads(path.read_text())
    assert result["total_output_tokens"] == 15
    assert "ttfts" not in result


def test_serve_says_what_the_server_refuses(server_port, tiny_model):
    done = bench(
        "serve", "--port", server_port, "--tokenizer", tiny_model, "--num-prompts", 2,
        "--input-len", 9000, status=2,
    )  # fmt: skip
    assert "--random-input-len 9000: requests of 9001 tokens or more" in done.stderr
    done = bench(
        "serve", "--port", server_port, "--tokenizer", tiny_model, "--num-prompts", 2,
        "--extra-body", '{"n": 0}', status=2,
    )  # fmt: skip
    assert "which is a trial, failed: status 400: " in done.stderr


def test_serve_asks_for_no_more_than_the_model_has_room_for(server_port, tiny_model):
    done = bench("serve", "--port", server_port, "--tokenizer", tiny_model, "--num-prompts", 2)
    assert "--random-input-len 213, --random-output-len 26" in done.stderr


@pytest.mark.parametrize("flags", [[], ["--async-engine", "--n", 2]])
def test_throughput(flags, tiny_model, engine_flags, tmp_path):
    path = tmp_path / "r.json"
    bench(
        "throughput", tiny_model, *engine_flags, "--num-prompts", 5, "--input-len", 10,
        "--output-len", 6, "--output-json", path, *flags,
    )  # fmt: skip
    result = json.loads(path.read_text())
    assert result["num_requests"] == 5
    assert result["total_output_tokens"] == (60 if flags else 30)
    seconds = result["elapsed_time"]
    assert result["requests_per_second"] == pytest.approx(5 / seconds)
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / seconds)


def test_latency(tiny_model, engine_flags, tmp_path):
    path = tmp_path / "r.json"
    done = bench(
        "latency", "--model", tiny_model, *engine_flags, "--input-len", 8, "--output-len", 4,
        "--batch-size", 2, "--num-iters-warmup", 1, "--num-iters", 3, "--output-json", path,
    )  # fmt: skip
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == pytest.approx(sorted(result["latencies"])[1])
    assert "Mean latency: " in done.stdout

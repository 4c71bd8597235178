"""From an engine's steps to figures of a simulation, through the commands and their files."""

import dataclasses
import json

import pytest

from jaxllm.cli.main import main
from jaxllm.cli.plan import as_json
from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.report import report_plan
from jaxllm.simulation.deployment import read_measurement
from jaxllm.testing import make_tiny_checkpoint

OPTIONS = {"max_model_len": 256, "max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 16}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


def test_steps_are_measured_and_simulated(model_dir, tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    file = tmp_path / "made" / "times.json"
    run = ["measure-steps", model_dir, "--out", str(file), "--repetitions=1", "--enforce-eager"]
    assert main([*run, *flags]) == 0
    deployment = read_measurement(file)
    assert deployment.buckets == make_plan(EngineArgs(model=model_dir, **OPTIONS)).buckets
    assert deployment.host_s_per_step > 0
    lines = deployment.step_time.lines.values()
    assert all(line.base_s + line.per_attended_s > 0 for line in lines)
    entries = json.loads(file.read_text())["lines"]
    assert all(entry["num_steps"] > 0 for entry in entries)
    assert model_dir not in file.read_text().replace(deployment.info.model, "")

    capsys.readouterr()
    simulate = ["simulate", "--step-times", str(file), "--num-requests=20", "--input-len=40"]
    assert main([*simulate, "--output-len=10", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["completed"] == 20 and summary["num_chips"] == 1
    assert summary["e2el_ms"]["p50"] > summary["ttft_ms"]["p50"] > 0


@pytest.fixture(scope="module")
def plan_file(model_dir, tmp_path_factory):
    """A plan for a chip whose rates are known, in place of one that takes long to compile for."""
    plan = make_plan(EngineArgs(model=model_dir, num_gpu_blocks_override=64, **OPTIONS))
    chip = dataclasses.replace(plan.chip, hbm_bytes_per_second=1e8, bf16_flops_per_second=1e12)
    report = report_plan(dataclasses.replace(plan, chip=chip), context=32, all_programs=False)
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    file.write_text(json.dumps({"here": as_json(report)}))
    return file, report


def simulated(capsys, *flags):
    capsys.readouterr()
    assert main(["simulate", *map(str, flags), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_is_simulated_by_its_roofline(plan_file, capsys):
    file, report = plan_file
    flags = ["--plan", file, "--num-requests=2", "--input-len=16", "--output-len=101", "--spread=0"]
    whole = simulated(capsys, *flags, "--efficiency=1", "--host-us=0")
    # A step for each token, with contexts from 16 to 116 tokens.
    step_ms = 1e3 * report.largest_decode.bound.seconds
    assert 0.9 * step_ms < whole["tpot_ms"]["mean"] < 1.3 * step_ms
    half = simulated(capsys, *flags, "--efficiency=0.5", "--host-us=0")
    assert half["duration"] == pytest.approx(2 * whole["duration"])
    priced = simulated(
        capsys, *flags, "--efficiency=1", "--host-us=0", "--price-per-chip-hour=3600"
    )
    assert priced["cost"] == pytest.approx(whole["duration"])


def test_where_every_prompt_is_too_long_nothing_is_served(plan_file, tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 100000, "output_length": 5}')
    flags = ["--plan", plan_file[0], "--efficiency=1", "--trace", trace]
    flags += ["--price-per-chip-hour=2"]
    summary = simulated(capsys, *flags)
    assert (summary["refused"], summary["completed"], summary["cost"]) == (1, 0, 0)
    assert (summary["output_throughput"], summary["cost_per_million_output_tokens"]) == (0, None)
    assert main(["simulate", *map(str, flags)]) == 0
    assert "cost 0.00, - per million output tokens" in capsys.readouterr().out


def test_the_fewest_replicas_are_found(plan_file, capsys):
    file, _ = plan_file
    flags = ["--plan", file, "--efficiency=1", "--num-requests=60", "--input-len=16"]
    flags += ["--output-len=20", "--goodput", "e2el:400"]
    few = simulated(capsys, *flags, "--find-replicas=0.95")
    num = few["num_replicas"]
    assert few["good_share"] >= 0.95 and num > 1
    assert simulated(capsys, *flags, "--replicas", num - 1)["good_share"] < 0.95


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "say by what"),
        (["--plan", "{plan}"], "--efficiency"),
        (["--plan", "{plan}", "--efficiency=0.5", "--on=there"], "there"),
        (["--plan", "{plan}", "--efficiency=0.5", "--goodput", "ttft=5"], "NAME:MS"),
        (["--plan", "{plan}", "--efficiency=0.5", "--find-replicas=0.5"], "--goodput"),
        (["--plan", "{plan}", "--efficiency=0.5", "--replicas=0"], "replicas=0"),
        (["--plan", "{plan}", "--efficiency=0.5", "--spread=-1"], "spread=-1"),
        (["--plan", "{plan}", "--efficiency=0.5", "--seed=-1"], "seed=-1"),
        (["--plan", "{plan}", "--efficiency=0.5", "--host-us=-1"], "host_us=-1"),
        (["--plan", "{plan}", "--efficiency=0.5", "--num-prefixes=-1"], "num_prefixes=-1"),
        (
            ["--plan", "{plan}", "--efficiency=0.5", "--num-prefixes=2", "--prefix-len=600"],
            "prefix_len=600: it must be a multiple of 512",
        ),
        (["--step-times", "{plan}"], "make it anew"),
    ],
)
def test_what_cannot_be_simulated_is_refused(plan_file, capsys, flags, message):
    flags = [flag.format(plan=plan_file[0]) for flag in flags]
    assert main(["simulate", *flags]) == 2
    assert message in capsys.readouterr().err


def test_several_replicas_are_not_measured(model_dir, tmp_path, capsys):
    out = str(tmp_path / "times.json")
    assert main(["measure-steps", model_dir, "--out", out, "--data-parallel-size=2"]) == 2
    assert "data_parallel_size=2" in capsys.readouterr().err

"""The report on a plan tells what the engine of that plan has."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import pytest

from jaxllm import LLM
from jaxllm.cli.main import main
from jaxllm.cli.plan import as_text
from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.compile import Program
from jaxllm.programs.declare import declare_programs, make_packer, num_programs
from jaxllm.programs.report import report_plan, step_bound
from jaxllm.programs.summary import summary
from jaxllm.testing import make_tiny_checkpoint

OPTIONS = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 12,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


def test_a_plan_equals_what_the_engine_allocates(model_dir):
    plan = make_plan(EngineArgs(model=model_dir, **OPTIONS))
    report = report_plan(plan, context=32, all_programs=False)
    before = {id(array) for array in jax.live_arrays()}
    llm = LLM(model_dir, skip_tokenizer_init=True, enforce_eager=True, **OPTIONS)
    arrays = [array for array in jax.live_arrays() if id(array) not in before]
    assert llm.llm_engine.info.cache_groups == report.cache_groups
    allocated = sum(array.nbytes for array in arrays)
    left_by_steps = plan.stages[0].between.steps_bytes  # none has run
    assert allocated + left_by_steps == (
        report.weights_bytes + report.kv_cache_bytes + report.state_bytes
    )


def test_the_largest_of_each_kind_is_compiled(model_dir):
    plan = make_plan(EngineArgs(model=model_dir, **OPTIONS))
    report = report_plan(plan, context=32, all_programs=False)
    assert [program.name for program in report.programs] == ["decode 2x2", "mixed 16x2"]
    assert report.largest_decode.num_decodes == 2
    assert report.programs[0].bound is None  # nobody knows the rates of a CPU
    assert report.num_fitting == report.num_tokens // 32


def test_copies_of_codes_are_looked_for(model_dir, monkeypatch):
    looked_for = []
    monkeypatch.setattr(
        "jaxllm.programs.report.whole_array_copies",
        lambda hlo, arrays: looked_for.extend(arrays) or [],
    )
    draft = {"method": "draft_model", "model": model_dir, "num_speculative_tokens": 2}
    options = OPTIONS | {"quantization": "int8", "kv_cache_dtype": "fp8"}
    plan = make_plan(EngineArgs(model=model_dir, speculative_config=draft, **options))
    report_plan(plan, context=32, all_programs=False)
    assert {"int8", "float32"} <= {array.dtype.name for array in looked_for}
    (stage,) = plan.stages
    # Codes of a cache are kept as bytes, those of the draft model's among them.
    caches = [array for array in looked_for if array.dtype == "uint8"]
    num_programs = len({key.decode_only for key in plan.buckets})
    cached = math.prod(caches[0].shape) * len(caches)
    assert cached == num_programs * stage.kv_cache_bytes


def test_a_bound_counts_weights_and_contexts_once(model_dir):
    plan = make_plan(EngineArgs(model=model_dir, **OPTIONS))
    chip = dataclasses.replace(plan.chip, hbm_bytes_per_second=1e6, bf16_flops_per_second=1e18)
    plan = dataclasses.replace(plan, chip=chip)
    bound = step_bound(plan, *plan.stages, 2, 2, context=32)
    context_bytes = 2 * 32 * plan.kv_cache_bytes / (12 * plan.block_size)
    # The embedding is not read, but for two rows of it.
    table_bytes = plan.architecture.vocab_size * plan.architecture.hidden_size * 4
    read = plan.weights_bytes - table_bytes + context_bytes
    assert bound.seconds == pytest.approx(read / 1e6)
    assert bound.limited_by == "memory bandwidth"

    slow = dataclasses.replace(chip, bf16_flops_per_second=1e3)
    plan = dataclasses.replace(plan, chip=slow)
    assert step_bound(plan, *plan.stages, 2, 2, context=32).limited_by == "arithmetic"


def test_tokens_per_second_are_those_of_the_rows_that_have_room(model_dir):
    plan = make_plan(EngineArgs(model=model_dir, **OPTIONS))
    chip = dataclasses.replace(plan.chip, hbm_bytes_per_second=1e6, bf16_flops_per_second=1e18)
    # One row of 300 tokens fits into 12 blocks of 32, and not the two of the largest decode.
    report = report_plan(dataclasses.replace(plan, chip=chip), context=300, all_programs=False)
    alone = step_bound(dataclasses.replace(plan, chip=chip), *plan.stages, 1, 1, context=300)
    assert report.num_fitting == 1
    assert report.max_tokens_per_second == pytest.approx(1 / alone.seconds)


def test_a_pipeline_is_reported_by_stages_and_its_slowest_one_sets_the_pace(model_dir):
    args = EngineArgs(model=model_dir, pipeline_parallel_size=2, **OPTIONS)
    plan = make_plan(args, jax.devices()[:1] * 2)
    chip = dataclasses.replace(
        plan.chip, hbm_bytes=1 << 30, hbm_bytes_per_second=1e6, bf16_flops_per_second=1e18
    )
    plan = dataclasses.replace(plan, chip=chip)
    report = report_plan(plan, context=32, all_programs=False)
    assert [p.name for p in report.programs] == [
        "stage 0, decode 2x2", "stage 0, mixed 16x2", "stage 1, decode 2x2", "stage 1, mixed 16x2"
    ]  # fmt: skip
    first, last = report.stages
    # The last one has the head and the sampler; both have a layer.
    assert (first.num_layers, last.num_layers) == (1, 1)
    assert last.used_bytes > first.used_bytes and last.state_bytes > first.state_bytes
    assert report.free_bytes == (1 << 30) - last.used_bytes
    # Two rows, one in each stage.
    pace = max(step_bound(plan, stage, 1, 1, context=32).seconds for stage in plan.stages)
    assert report.max_tokens_per_second == pytest.approx(1 / pace)
    page = as_text("cpu", report, None)
    assert "stage 0   stage 1" in page and "each of the 2 stages" in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say where"),
        (["--tpu", "v6e-8", "--gpu", "h200"], "say where"),
        (["--tpu", "v99-1"], "no topology is named 'v99-1'; known are"),
        (["--tpu", "v6e-8", "--context", "0"], "--context 0 must be at least 1"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, message, model_dir, capsys):
    assert main(["plan", model_dir, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_as_many_programs_are_said_as_there_are(model_dir):
    for num_stages in (1, 2):
        config = EngineArgs(model_dir, max_num_seqs=4, pipeline_parallel_size=num_stages)
        plan = make_plan(config, jax.devices()[:1] * num_stages)
        declared = declare_programs(plan, make_packer(plan).layouts)
        assert num_programs(plan) == len(declared)
        assert f"{len(declared)} programs, with steps of " in summary(plan)


def test_a_config_may_have_any_name(model_dir, tmp_path, capsys):
    file = tmp_path / "q8.json"
    file.write_bytes((Path(model_dir) / "config.json").read_bytes())
    flags = ["--cpu", "--max-num-seqs", "1", "--max-num-batched-tokens", "8", "--json"]
    assert main(["plan", "--model", str(file), *flags]) == 0
    report = json.loads(capsys.readouterr().out)["cpu"]
    assert report["model"] == str(file) and report["weights_bytes"]
    file.write_text("{")
    assert main(["plan", "--model", str(file), *flags]) == 2
    assert f"{file} cannot be read as JSON" in capsys.readouterr().err
    weights = tmp_path / "m.gguf"
    weights.write_bytes(b"GGUF")
    assert main(["plan", str(weights), *flags]) == 2
    assert "m.gguf is truncated: it has 4 bytes" in capsys.readouterr().err


@pytest.mark.tpu_compile
def test_the_command_prints_a_page_and_json(model_dir, capsys, monkeypatch):
    pytest.importorskip("libtpu")
    compiled, compile_program = {}, Program.compile

    def compile_once(program, lowered):
        text = lowered.as_text()
        if text not in compiled:
            compiled[text] = compile_program(program, lowered)
        return compiled[text]

    # Both commands need the same programs, which take the test nearly all of its time.
    monkeypatch.setattr(Program, "compile", compile_once)
    flags = [model_dir, "--tpu", "v6e-1", "--max-num-seqs", "4", "--context", "64"]
    flags += ["--max-num-batched-tokens", "16", "--dtype", "bfloat16"]
    assert main(["plan", *flags, "--price-per-chip-hour", "2"]) == 0
    page = capsys.readouterr().out
    assert "attention 'tpu'" in page and "no collectives" in page
    assert "bound, not a prediction" in page and "per million output tokens" in page
    assert main(["plan", *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["v6e-1"]
    assert report["chip"] == "v6e" and report["max_tokens_per_second"] > 0
    assert report["free_bytes"] > 0


@pytest.mark.tpu_compile
def test_a_program_that_does_not_fit_is_refused_in_words(model_dir, capsys):
    pytest.importorskip("libtpu")
    # XLA's attention copies a cache that takes all the memory there is.
    flags = ["--tpu", "v6e-1", "--attention-backend", "xla", "--max-num-seqs", "4"]
    flags += ["--max-num-batched-tokens", "16", "--dtype", "bfloat16"]
    assert main(["plan", model_dir, *flags]) == 2
    error = capsys.readouterr().err
    assert "mixed_16x4 does not fit into a device (" in error and "Traceback" not in error
    assert "lower --kv-cache-memory-bytes" in error
    assert main(["plan", model_dir, *flags, "--kv-cache-memory-bytes", str(1 << 28)]) == 0

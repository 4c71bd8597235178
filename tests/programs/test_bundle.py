"""An engine runs programs that were compiled before it, or says why not and compiles its own."""

import dataclasses
import hashlib
import importlib.util
import json
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.cli.main import main
from jaxllm.config import EngineArgs
from jaxllm.plan.draft_plan import DraftPlan
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.gpu_compiler import TIMED, UNTIMED
from jaxllm.plan.make_plan import make_plan
from jaxllm.plan.stages import StagePlan
from jaxllm.programs import identity
from jaxllm.programs.bundle import BundleError, BundleWriter, load_programs
from jaxllm.programs.compile import compilation_counter
from jaxllm.programs.identity import program_identity
from jaxllm.programs.sizing import plan_engine
from jaxllm.runner.jax_setup import use_compilation_cache
from jaxllm.sampling.logits_processor import LogitsProcessor
from jaxllm.testing import make_tiny_checkpoint

OPTIONS = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
# More than an engine of these options would choose on a CPU.
NUM_BLOCKS = 12
PROMPTS = [{"prompt_token_ids": list(range(1, 30))}, {"prompt_token_ids": [7, 8, 9]}]
PARAMS = [
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12, logprobs=2),
    SamplingParams(seed=3, max_tokens=12, top_k=20, prompt_logprobs=1),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def made_bundle(model_dir, tmp_path_factory, new_cache):
    flags = [model_dir, "--cpu", *FLAGS, f"--num-gpu-blocks-override={NUM_BLOCKS}"]
    # Its programs are in a compilation cache already, from where they must not be taken.
    use_compilation_cache(str(new_cache()))
    assert main(["plan", *flags, "--all-programs"]) == 0
    directory = tmp_path_factory.mktemp("bundle")
    assert main(["plan", *flags, "--out", str(directory)]) == 0
    return directory


@pytest.fixture
def bundle(made_bundle, tmp_path):
    """A copy, to be damaged."""
    return Path(shutil.copytree(made_bundle, tmp_path / "bundle"))


@pytest.fixture
def warnings(caplog):
    """What the engine warns of, as text."""
    logger = logging.getLogger("jaxllm")
    logger.addHandler(caplog.handler)
    yield lambda: caplog.text
    logger.removeHandler(caplog.handler)


def args(model_dir, bundle=None, **options):
    return EngineArgs(
        model=model_dir, program_bundle=bundle and str(bundle), **{**OPTIONS, **options}
    )


def edit_manifest(bundle, **changes):
    path = bundle / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | changes))


def answers(llm):
    return [
        (answer.token_ids, answer.logprobs)
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        for answer in output.outputs
    ]


@pytest.mark.slow
def test_an_engine_from_a_bundle_compiles_nothing_and_answers_the_same(model_dir, made_bundle):
    options = OPTIONS
    before = compilation_counter.compiles
    llm = LLM(model_dir, program_bundle=str(made_bundle), **options)
    from_bundle = answers(llm)
    assert compilation_counter.compiles == before
    # The programs have the bundle's blocks in their shapes, so the engine has as many.
    assert llm.llm_engine.info.cache_groups[0].num_blocks == NUM_BLOCKS
    assert from_bundle == answers(LLM(model_dir, **options))


TWO_DEVICES = """
import json, sys
from jaxllm.cli.main import main
from jaxllm.programs.compile import compilation_counter
from jaxllm.runner.jax_setup import use_compilation_cache
from jaxllm import LLM, SamplingParams
model, bundle, flags, options = *sys.argv[1:3], *map(json.loads, sys.argv[3:])
assert main(["plan", model, "--cpu", "--out", bundle, *flags]) == 0
before, tokens = compilation_counter.compiles, []
for how in ({"program_bundle": bundle}, {}):
    llm = LLM(model, tensor_parallel_size=2, **options, **how)
    prompt = {"prompt_token_ids": list(range(1, 30))}
    output = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    tokens.append(list(output[0].outputs[0].token_ids))
    if how:
        assert compilation_counter.compiles == before
assert tokens[0] == tokens[1], tokens
"""


@pytest.mark.slow
def test_a_bundle_for_two_devices(model_dir, tmp_path):
    arguments = [model_dir, str(tmp_path), json.dumps(FLAGS), json.dumps(OPTIONS)]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES, *arguments],
        capture_output=True, text=True, env=environment, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_a_plan_is_made_for_its_bundle(model_dir, made_bundle):
    plan = plan_engine(args(model_dir, made_bundle))
    assert plan.program_bundle == made_bundle and plan.num_blocks == NUM_BLOCKS
    assert load_programs(plan, ["decode 2x2", "make_state"]).keys() == {"decode 2x2", "make_state"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_logprobs": 3}, "it was made for max_logprobs '20', and here it is '3'"),
        ({"dtype": "bfloat16"}, "differ, too"),
        ({"num_gpu_blocks_override": 5}, "it was made for num_blocks '12', and here it is '5'"),
    ],
)
def test_another_engine_takes_no_bundle_and_says_why(
    options, reason, model_dir, made_bundle, warnings
):
    plan = plan_engine(args(model_dir, made_bundle, **options))
    assert plan.program_bundle is None
    assert plan.num_blocks == make_plan(args(model_dir, **options)).num_blocks
    assert reason in warnings() and "compiling instead" in warnings()


@pytest.mark.slow
def test_other_versions_take_no_bundle(model_dir, bundle, warnings):
    made_for = json.loads((bundle / "manifest.json").read_text())["made_for"]
    edit_manifest(bundle, made_for=made_for | {"jaxlib": "0.0.1"})
    assert plan_engine(args(model_dir, bundle)).program_bundle is None
    assert "it was made for jaxlib '0.0.1'" in warnings()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (shutil.rmtree, "No such file or directory"),
        (lambda bundle: (bundle / "manifest.json").write_text("{"), "cannot be read"),
        (lambda bundle: (bundle / "manifest.json").write_text("[]"), "cannot be read"),
        (lambda bundle: edit_manifest(bundle, format=9), "its format is 9"),
    ],
)
def test_what_is_no_bundle_is_not_taken(damage, reason, model_dir, bundle, warnings):
    damage(bundle)
    assert plan_engine(args(model_dir, bundle)).program_bundle is None
    assert reason in warnings() and "compiling instead" in warnings()


class Trap:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


@pytest.mark.slow
def test_nothing_is_unpickled_that_the_manifest_does_not_vouch_for(
    model_dir, bundle, tmp_path, warnings
):
    plan = plan_engine(args(model_dir, bundle))
    trap, trace = pickle.dumps(Trap(tmp_path / "trace")), tmp_path / "trace"
    (bundle / "make_state.pickle").write_bytes(trap)
    assert load_programs(plan, ["make_state"]) == {}
    assert "make_state.pickle is damaged" in warnings() and not trace.exists()

    (tmp_path / "outside.pickle").write_bytes(trap)
    entry = {"file": "../outside.pickle", "sha256": hashlib.sha256(trap).hexdigest()}
    edit_manifest(bundle, programs={"make_state": entry})
    assert load_programs(plan, ["make_state"]) == {}
    assert "outside its directory" in warnings() and not trace.exists()

    # Whoever writes the manifest, too, has his code run: a bundle is for those who trust it.
    shutil.copy(tmp_path / "outside.pickle", bundle / "make_state.pickle")
    edit_manifest(bundle, programs={"make_state": entry | {"file": "make_state.pickle"}})
    assert load_programs(plan, ["make_state"]) == {}
    assert trace.exists()


@pytest.mark.slow
def test_a_program_that_cannot_be_loaded_or_is_missing_is_compiled(model_dir, bundle, warnings):
    plan = plan_engine(args(model_dir, bundle))
    assert load_programs(plan, ["decode 2x2", "decode 99x99"]) == {}
    assert "it lacks the program decode 99x99" in warnings()
    data = pickle.dumps((b"no executable", pickle.dumps((None, None))))
    (bundle / "decode_2x2.pickle").write_bytes(data)
    entry = {"file": "decode_2x2.pickle", "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(bundle, programs={"decode 2x2": entry})
    assert load_programs(plan, ["decode 2x2"]) == {}
    assert "UnpicklingError" in warnings()


@pytest.mark.parametrize("tiles", [None, TIMED, UNTIMED])
def test_tiles_that_nobody_timed_are_told_of(tiles, model_dir, bundle, warnings):
    edit_manifest(bundle, gpu_tiles=tiles)
    load_programs(plan_engine(args(model_dir, bundle)), {})
    assert ("from a formula, not timed" in warnings()) == (tiles == UNTIMED)


@pytest.mark.parametrize(
    "change",
    [
        {"max_logprobs": 3},
        {"block_size": 16},
        {"dtype": "bfloat16"},
        {"max_num_seqs": 3},
        {"max_model_len": 32},
        {"attention_backend": "reference"},
        {"num_gpu_blocks_override": 9},
        {"hf_overrides": {"rms_norm_eps": 1e-3}},
        {"hf_overrides": {"rope_theta": 1e6}},
    ],
)
def test_what_changes_a_program_changes_the_identity(change, model_dir):
    identity = program_identity(make_plan(args(model_dir)))
    assert program_identity(make_plan(args(model_dir, **change))) != identity


@pytest.mark.parametrize("change", [{"seed": 5}, {"load_format": "dummy"}, {"enforce_eager": True}])
def test_what_changes_no_program_leaves_the_identity(change, model_dir, tmp_path):
    identity = program_identity(make_plan(args(model_dir)))
    assert program_identity(make_plan(args(model_dir, **change))) == identity
    moved = shutil.copytree(model_dir, tmp_path / "moved")
    assert program_identity(make_plan(args(str(moved), **change))) == identity


def test_fields_that_are_left_out_of_the_identity_exist():
    parts = (EnginePlan, StagePlan, DraftPlan)
    assert identity._NOT_IN_PROGRAMS <= {f.name for part in parts for f in dataclasses.fields(part)}


def test_what_is_traced_imports_nothing_that_is_left_out_of_the_identity():
    root = Path(identity.__file__).parents[1]
    for folder in ("layers", "models", "parallel", "runner", "sampling"):
        for file in (root / folder).glob("*.py"):
            for name in re.findall(r"^ *(?:from|import) jaxllm\.(\w+)", file.read_text(), re.M):
                # Of metrics only what the runner measures itself by.
                assert name not in identity._BESIDE_PROGRAMS - {"metrics"}, (file, name)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("jax_default_matmul_precision", "highest"),
        ("jax_enable_x64", True),
        ("jax_debug_nans", True),
        ("jax_debug_infs", True),
        ("jax_use_shardy_partitioner", False),
    ],
)
def test_settings_of_jax_that_change_programs_are_part_of_the_identity(setting, value, model_dir):
    plan = make_plan(args(model_dir))
    here, before = program_identity(plan), getattr(jax.config, setting)
    assert before != value
    try:
        jax.config.update(setting, value)
        assert program_identity(plan) != here
    finally:
        jax.config.update(setting, before)
    assert program_identity(plan) == here


def test_how_much_is_optimised_is_part_of_the_identity(model_dir):
    plan = make_plan(args(model_dir))
    here, before = program_identity(plan), jax.config.read("jax_disable_most_optimizations")
    try:
        jax.config.update("jax_disable_most_optimizations", not before)
        assert program_identity(plan) != here
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert program_identity(plan) == here


def test_flags_for_the_compiler_are_part_of_the_identity(model_dir, monkeypatch):
    plan = make_plan(args(model_dir))
    here = program_identity(plan)
    # JAX says this on a TPU VM, and the programs say it everywhere.
    monkeypatch.setenv("LIBTPU_INIT_ARGS", " --xla_tpu_use_enhanced_launch_barrier=true")
    assert program_identity(plan) == here
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=65536")
    assert program_identity(plan) != here


class Processor(LogitsProcessor):
    """Code that is not of jaxllm."""

    def encode(self, params):
        return None

    def apply(self, logits, params, output_index):
        return logits


def test_code_from_outside_is_in_no_bundle(model_dir, tmp_path):
    plan = make_plan(args(model_dir, logits_processors=[Processor]))
    with pytest.raises(BundleError, match="logits processors would be in the programs"):
        BundleWriter(tmp_path / "new", plan)
    outside = dataclasses.replace(make_plan(args(model_dir)), model_class=Processor)
    with pytest.raises(BundleError, match="Processor would be in the programs"):
        BundleWriter(tmp_path / "new", outside)


def test_a_directory_with_something_in_it_is_left_alone(model_dir, tmp_path, capsys):
    (tmp_path / "mine").write_text("x")
    assert main(["plan", model_dir, "--cpu", *FLAGS, "--out", str(tmp_path)]) == 2
    assert "the directory is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_bundle_is_of_one_plan(model_dir, tmp_path, capsys):
    assert main(["plan", model_dir, "--compare", "v6e-1,cpu", "--out", str(tmp_path)]) == 2
    assert "--out keeps the programs of one plan" in capsys.readouterr().err


@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu")
def test_a_bundle_for_a_tpu_is_made_without_one(model_dir, tmp_path, capsys):
    flags = ["--dtype=bfloat16", "--max-model-len=64", "--max-num-seqs=1"]
    flags += ["--max-num-batched-tokens=16", "--tpu=v6e-1", f"--out={tmp_path}"]
    assert main(["plan", model_dir, *flags]) == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    made_for = manifest["made_for"]
    assert made_for["devices"] == "1 x TPU v6 lite" and "TFRT TPU v6 lite" in made_for["compiler"]
    assert {"decode 1x1", "mixed 16x1", "make_state"} <= manifest["programs"].keys()

"""A second start compiles nothing: all that the first one compiled, or a warm-up, is found again,
wherever the sources and the cache have moved to."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxllm.cli.main import main
from jaxllm.testing import make_tiny_checkpoint

ROOT = Path(__file__).parents[2]
FLAGS = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "dtype": "bfloat16",
}

WARM_UP = "import sys; from jaxllm.cli.main import main; sys.exit(main(sys.argv[1:]))"

# Everything that this process compiles counts: loading, the state, steps, a slot of the sampler.
START = """
import json, sys
from jaxllm.programs.compile import compilation_counter
from jaxllm import LLM, SamplingParams
model, options = sys.argv[1], json.loads(sys.argv[2])
llm = LLM(model, **options)
params = SamplingParams(temperature=0, repetition_penalty=1.5, max_tokens=4, prompt_logprobs=1)
llm.generate([{"prompt_token_ids": list(range(1, 30))}], params, use_tqdm=False)
print(json.dumps([compilation_counter.compiles, compilation_counter.cache_hits]))
"""

# What a key is made of beside versions and flags. Another depth of calls for each tree.
LOWER = """
import hashlib, json, sys
from jaxllm_kernels.topology import topology_devices
from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
model, options, depth = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
plan = make_plan(EngineArgs(model=model, **options), topology_devices("v6e-1"))
assert plan.attention.name == "tpu"
def lower(program, depth):
    return lower(program, depth - 1) if depth else program.lower().as_text()
for key, program in declare_programs(plan, make_packer(plan).layouts).items():
    print(key, hashlib.sha256(lower(program, depth).encode()).hexdigest())
"""


@pytest.fixture
def moved_tree(tmp_path):
    """The sources, at another path."""
    tree = tmp_path / "elsewhere" / "deeper"
    shutil.copytree(ROOT / "jaxllm", tree / "jaxllm")
    shutil.copytree(ROOT / "kernels", tree / "kernels")
    return tree


@pytest.fixture
def no_cache():
    """The process has no compilation cache, whatever ran in it before."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def run(code, tree, *arguments, num_devices=1):
    """Run a script with the sources of a tree."""
    environment = os.environ | {
        "PYTHONPATH": f"{tree}:{tree / 'kernels'}",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(num_devices),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, env=environment, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_shards", "load_format"),
    [(1, "auto"), pytest.param(2, "dummy", marks=pytest.mark.sweep)],
)
def test_an_engine_compiles_nothing_after_a_warmup(
    num_shards, load_format, tmp_path, moved_tree, new_cache
):
    model_dir = make_tiny_checkpoint(tmp_path / "model")
    weights = (model_dir / "model.safetensors").rename(tmp_path / "away")
    cache = new_cache()
    options = FLAGS | {"tensor_parallel_size": num_shards}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    flags += ["--json", f"--compilation-cache-dir={cache}"]
    warmed = json.loads(run(WARM_UP, ROOT, "warmup", model_dir, *flags, num_devices=num_shards))
    (report,) = warmed["replicas"]
    assert report["num_programs"] > 3 and report["cache_hits"] == 0
    assert warmed["num_files"] >= report["num_programs"] and warmed["num_bytes"] > 0

    if load_format == "auto":
        weights.rename(model_dir / "model.safetensors")
    moved_cache = cache.rename(tmp_path / "moved")
    options |= {"compilation_cache_dir": str(moved_cache), "load_format": load_format}

    def start():
        started = run(START, moved_tree, model_dir, json.dumps(options), num_devices=num_shards)
        return json.loads(started.splitlines()[-1])

    assert start() == [0, 0]  # all programs are taken from the store: to JAX, nothing was compiled
    shutil.rmtree(moved_cache / "programs")
    compiles, cache_hits = start()
    assert compiles == cache_hits == report["num_programs"]


@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu")
def test_the_bodies_of_tpu_kernels_do_not_say_where_they_are_from(tmp_path, moved_tree):
    model_dir = make_tiny_checkpoint(tmp_path / "model")
    here = run(LOWER, ROOT, model_dir, json.dumps(FLAGS), 0)
    assert run(LOWER, moved_tree, model_dir, json.dumps(FLAGS), 3) == here


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--enforce-eager"], "enforce_eager=True asks to compile nothing ahead"),
        (["--compilation-cache-dir="], "there is no compilation cache to fill"),
    ],
)
def test_what_cannot_be_warmed_up_is_refused(flags, message, tmp_path, capsys, no_cache):
    assert main(["warmup", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err

"""Whole steps of a Llama-3-8B, compiled for an H200 that is not there."""

import importlib.util
import re

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import CacheConfig, EngineArgs
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import collectives, whole_array_copies
from jaxllm.programs.launches import (
    all_launches,
    by_name,
    compile_and_list,
    in_command_buffer,
    least,
)
from jaxllm.programs.sizing import plan_engine

NUM_LAYERS = 32
# Of a layer, of the step around the layers if its rows are greedy, and of that with all branches.
LAUNCHES = {
    "decode": (10, 22, 124),
    "mixed": (11, 42, 193),
}
MAX_TEMP_BYTES = 256 << 20
VOCAB_SIZE = 128256

pytestmark = [
    pytest.mark.gpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="no CUDA plugin of JAX: nothing is compiled for GPUs (see README)",
    ),
]


@pytest.fixture(scope="module")
def plan(llama_3_8b):
    args = EngineArgs(model=llama_3_8b, max_num_seqs=64, max_num_batched_tokens=2048)
    return plan_engine(args, topology_devices("h200"))


@pytest.fixture(scope="module")
def short_plan(llama_3_8b):
    """Of two layers, which show what a step has around its layers."""
    overrides = {"num_hidden_layers": 2}
    args = EngineArgs(
        model=llama_3_8b,
        hf_overrides=overrides,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=1024,
    )
    return plan_engine(args, topology_devices("h200"))


def program_of(plan, decode_only, num_tokens):
    declared = declare_programs(plan, make_packer(plan).layouts)
    bucket = next(
        b for b in plan.buckets if (b.decode_only, b.num_tokens) == (decode_only, num_tokens)
    )
    return declared, declared[bucket]


@pytest.mark.parametrize(
    ("decode_only", "num_tokens"),
    [(True, 64), pytest.param(False, 2048, marks=pytest.mark.sweep)],
)
def test_a_step(decode_only, num_tokens, plan, short_plan, tmp_path):
    declared, program = program_of(plan, decode_only, num_tokens)
    lowered, compiled, launches = compile_and_list(program, tmp_path / "dump")
    traced = lowered.as_text()
    weights, state, _ = program.arguments
    hlo = compiled.as_text()
    assert not whole_array_copies(hlo, [*weights, *state.caches])
    assert not collectives(hlo)
    # Whatever computes a layer's products writes them rounded; only logits are float32.
    wide = re.findall(r"stablehlo\.dot_general .*-> tensor<(?:\d+x)*(\d+)xf32>", traced)
    assert set(wide) == {str(VOCAB_SIZE)}

    memory = compiled.memory_analysis()
    cache_bytes = sum(cache.size * cache.dtype.itemsize for cache in state.caches)
    assert memory.alias_size_in_bytes >= cache_bytes
    counted = plan.weights_bytes + plan.kv_cache_bytes
    assert memory.argument_size_in_bytes == pytest.approx(counted, rel=0.02)
    assert memory.temp_size_in_bytes < MAX_TEMP_BYTES
    # The plan fills what the user leaves to it, less what a program needed that was compiled for a
    # guess of it. Those that are declared in the end need no more, and little less.
    promised = plan.chip.hbm_bytes * CacheConfig().gpu_memory_utilization
    code_bytes = memory.generated_code_size_in_bytes * len(declared)
    needed = memory.peak_memory_in_bytes + code_bytes
    assert needed <= promised
    assert needed == pytest.approx(promised, rel=0.02)

    assert plan.attention.name == "mosaic_sm90"
    _, program = program_of(short_plan, decode_only, num_tokens)
    *_, short_launches = compile_and_list(program, tmp_path / "short")
    many, few = in_command_buffer(launches), in_command_buffer(short_launches)
    of_layers = len(many) - len(few)
    of_a_layer, around, in_all = LAUNCHES["decode" if decode_only else "mixed"]
    assert of_layers <= of_a_layer * (NUM_LAYERS - 2), by_name(many) - by_name(few)
    assert least(few) <= 2 * of_a_layer + around, by_name(few)
    assert len([*all_launches(few)]) <= 2 * of_a_layer + in_all, by_name(all_launches(few))

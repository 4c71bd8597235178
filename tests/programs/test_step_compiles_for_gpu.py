"""Whole steps of a Llama-3-8B, compiled for an H200 that is not there."""

import dataclasses
import importlib.util
import re

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import CacheConfig, EngineArgs
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import collectives, whole_array_copies
from jaxllm.programs.sizing import plan_engine

NUM_LAYERS = 32
MAX_LAUNCHES_PER_LAYER = 16
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


def compile_and_dump(program, folder):
    """The program as it was traced, the executable, and the launches of the step as XLA lists
    them."""
    options = (*program.compiler_options, ("xla_dump_to", str(folder)))
    program = dataclasses.replace(program, compiler_options=options)
    lowered = program.lower()
    compiled = program.compile(lowered)
    (listing,) = folder.glob("*thunk_sequence_after_thunk_passes.txt")
    return lowered.as_text(), compiled, listing.read_text()


@pytest.mark.parametrize(("decode_only", "num_tokens"), [(True, 64), (False, 2048)])
def test_a_step(decode_only, num_tokens, plan, tmp_path):
    declared = declare_programs(plan, make_packer(plan).layouts)
    bucket = next(
        b for b in plan.buckets if (b.decode_only, b.num_tokens) == (decode_only, num_tokens)
    )
    traced, compiled, launches = compile_and_dump(declared[bucket], tmp_path / "dump")
    weights, state, _ = declared[bucket].arguments
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
    top_level = re.findall(r"^\d+: (k\w+)", launches, re.MULTILINE)
    assert top_level == ["kCommandBuffer"]
    # Of the layers; the sampler, with all its branches, has 203 more.
    num_launches = len(re.findall(r"\d+: k(?:Custom|Gemm|Cublas|Copy|Mem)\w*", launches))
    assert (num_launches - 203) / NUM_LAYERS <= MAX_LAUNCHES_PER_LAYER, num_launches

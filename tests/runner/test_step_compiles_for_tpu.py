"""Whole steps of a Llama-3-8B, compiled for one TPU chip that is not there."""

import importlib.util

import jax
import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.runner.compile import Programs
from jaxllm.runner.hlo import collectives, whole_array_copies
from jaxllm.runner.plan import make_plan
from jaxllm.runner.programs import declare_programs, make_packer

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
    ),
]


@pytest.mark.parametrize("slice_name", ["v5p-8", "v6e-1", "v7x-8"])
def test_decode_and_mixed_step(slice_name, llama_3_8b):
    args = EngineArgs(model=llama_3_8b, max_num_seqs=64, max_num_batched_tokens=2048)
    plan = make_plan(args, topology_devices(slice_name)[:1])
    declared = declare_programs(plan, make_packer(plan).layouts)
    programs = Programs(declared)
    for bucket in (
        next(b for b in plan.buckets if b.decode_only and b.num_tokens == 64),
        next(b for b in plan.buckets if not b.decode_only and b.num_tokens == 2048),
    ):
        compiled = programs[bucket]
        weights, state, _ = declared[bucket].arguments
        hlo = compiled.as_text()
        assert not whole_array_copies(hlo, [*weights, *state.caches]), bucket
        assert not collectives(hlo), bucket

        memory = compiled.memory_analysis()
        cache_bytes = sum(cache.size * cache.dtype.itemsize for cache in state.caches)
        assert memory.alias_size_in_bytes >= cache_bytes
        planned = plan.weights_bytes + plan.kv_cache_bytes
        # What the plan counts, against all that the program is given.
        assert memory.argument_size_in_bytes == pytest.approx(planned, rel=0.02)
        peak = memory.peak_memory_in_bytes + memory.generated_code_size_in_bytes
        assert peak <= plan.chip.hbm_bytes
        jax.clear_caches()

"""Whole steps of a Llama-3-8B, compiled for one TPU chip that is not there."""

import importlib.util

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.runner.compile import Programs
from jaxllm.runner.hlo import collectives, whole_array_copies
from jaxllm.runner.plan import make_plan
from jaxllm.runner.programs import declare_programs, make_packer
from jaxllm.runner.sizing import plan_engine

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
    plan = plan_engine(args, topology_devices(slice_name)[:1])
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
    # No room is left unused, but for the share that the user wants to keep and the programs.
    useful = 64 * plan.blocks_per_seq
    share = memory.argument_size_in_bytes / (plan.chip.hbm_bytes * 0.92)
    assert plan.num_blocks == useful or 0.9 < share <= 1


@pytest.mark.parametrize(("slice_name", "num_shards"), [("v5e-8", 8), ("v6e-4", 4)])
def test_a_model_cut_over_chips_exchanges_two_sums_per_layer(slice_name, num_shards, llama_3_8b):
    num_layers = 4
    args = EngineArgs(
        model=llama_3_8b,
        hf_overrides={"num_hidden_layers": num_layers},
        max_num_seqs=64,
        max_num_batched_tokens=256,
        tensor_parallel_size=num_shards,
    )
    plan = make_plan(args, topology_devices(slice_name))
    declared = declare_programs(plan, make_packer(plan).layouts)
    programs = Programs(declared)
    for bucket in (
        next(b for b in plan.buckets if b.decode_only and b.num_tokens == 64),
        next(b for b in plan.buckets if not b.decode_only and b.num_tokens == 256),
    ):
        compiled = programs[bucket]
        weights, state, _ = declared[bucket].arguments
        hlo = compiled.as_text()
        assert not whole_array_copies(hlo, [*weights, *state.caches]), bucket
        # Of the activations; what the sampler exchanges is a few numbers per row.
        large = [c for c in collectives(hlo) if c.num_bytes >= bucket.num_tokens * 4096 * 2]
        assert [c.opcode for c in large] == ["all-reduce"] * (2 * num_layers + 1), bucket
        assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(
            plan.weights_bytes + plan.kv_cache_bytes, rel=0.02
        )

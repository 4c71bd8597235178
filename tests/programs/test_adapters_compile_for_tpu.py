"""Steps whose rows have adapters, compiled for TPUs that are not there: nothing is copied that does
not change, and what is exchanged beside the model's own sums is small."""

import importlib.util
import math

import jax
import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.compile import Programs
from jaxllm.programs.declare import WRITE_ADAPTER, declare_programs, make_packer, program_key
from jaxllm.programs.hlo import collectives, whole_array_copies

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
    ),
]
NUM_LAYERS = 2
SLOTS = {"max_loras": 8, "max_lora_rank": 32}


@pytest.mark.parametrize(
    ("slice_name", "num_shards", "decode_only"),
    [
        ("v6e-4", 4, True),
        *(
            pytest.param(*its, marks=pytest.mark.sweep)
            for its in (("v6e-4", 4, False), ("v6e-1", 1, True), ("v6e-1", 1, False))
        ),
    ],
)
def test_a_step_reads_adapters_where_they_are(slice_name, num_shards, decode_only, llama_3_8b):
    args = EngineArgs(
        model=llama_3_8b,
        hf_overrides={"num_hidden_layers": NUM_LAYERS},
        max_num_seqs=64,
        max_num_batched_tokens=256,
        tensor_parallel_size=num_shards,
        num_gpu_blocks_override=8003,
        enable_lora=True,
        **SLOTS,
    )
    plan = make_plan(args, topology_devices(slice_name)[:num_shards])
    assert plan.adapters is not None
    declared = declare_programs(plan, make_packer(plan).layouts)
    num_tokens = 64 if decode_only else 256
    wanted = (decode_only, num_tokens, True)
    bucket = next(
        its for its in plan.buckets if (its.decode_only, its.num_tokens, its.has_adapters) == wanted
    )
    programs = Programs(declared)
    weights, state, *_, adapters = declared[bucket].arguments
    arrays = jax.tree.leaves(adapters)
    (num_bytes,) = plan.adapters.bytes_by_stage
    hlo = programs[bucket].as_text()
    assert not whole_array_copies(hlo, [*arrays, *weights, *state.caches])
    counted = plan.weights_bytes + plan.kv_cache_bytes + num_bytes
    memory = programs[bucket].memory_analysis()
    assert memory.argument_size_in_bytes == pytest.approx(counted, rel=0.02)
    if num_shards > 1:
        sums = [one.num_bytes for one in collectives(hlo) if one.opcode == "all-reduce"]
        assert sums.count(num_tokens * 4096 * 2) == 2 * NUM_LAYERS + 1  # as without adapters
        # Layers that are cut by their inputs have parts of A's product on each device.
        assert sums.count(num_tokens * math.prod(SLOTS.values()) * 2) == 2 * NUM_LAYERS
    # One that takes a slot is written where it is to be.
    write = programs[program_key(plan.stages[0], WRITE_ADAPTER)]
    assert write.memory_analysis().alias_size_in_bytes == pytest.approx(num_bytes, rel=0.01)
    assert not whole_array_copies(write.as_text(), arrays)

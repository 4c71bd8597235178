"""Whole steps of a Llama-3-8B, compiled for one TPU chip that is not there."""

import importlib.util

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.compile import Programs
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import collectives, whole_array_copies
from jaxllm.programs.report import report_plan
from jaxllm.programs.sizing import plan_engine
from tests.programs.late import late_rows_bytes, num_steps

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
    ),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("slice_name", "num_layers"), [("v6e-1", 8), ("v5p-8", 32), ("v6e-1", 32), ("v7x-8", 32)]
)
def test_decode_and_mixed_step(slice_name, num_layers, llama_3_8b):
    args = EngineArgs(
        model=llama_3_8b,
        hf_overrides={"num_hidden_layers": num_layers},
        max_num_seqs=64,
        max_num_batched_tokens=2048,
    )
    plan = plan_engine(args, topology_devices(slice_name)[:1])
    declared = declare_programs(plan, make_packer(plan).layouts)
    compiled = {}
    report = report_plan(
        plan,
        context=1024,
        all_programs=False,
        on_compiled=lambda key, program: compiled.update({key: program}),
    )
    assert [(b.decode_only, b.num_tokens) for b in compiled] == [(True, 64), (False, 2048)]
    memories = [program.memory_analysis() for program in compiled.values()]
    for bucket, memory in zip(compiled, memories, strict=True):
        weights, state, _ = declared[bucket].arguments
        hlo = compiled[bucket].as_text()
        assert not whole_array_copies(hlo, [*weights, *state.caches]), bucket
        assert not collectives(hlo), bucket

        cache_bytes = sum(cache.size * cache.dtype.itemsize for cache in state.caches)
        assert memory.alias_size_in_bytes >= cache_bytes
        # What the plan counts, against all that the program is given.
        counted = plan.weights_bytes + plan.kv_cache_bytes
        assert memory.argument_size_in_bytes == pytest.approx(counted, rel=0.02)

    # The plan fills what the user leaves to it: what it takes in all is known before the programs
    # are, from one that was compiled for a guess of it. They take no more, and little less.
    promised = plan.chip.hbm_bytes * args.cache.gpu_memory_utilization
    codes = [memory.generated_code_size_in_bytes for memory in memories]
    peak = max(memory.peak_memory_in_bytes for memory in memories)
    beside = late_rows_bytes(plan, declared)
    # Of the programs that are not compiled here, none has to be longer than the longest.
    for codes_of_steps in (sum(codes), max(codes) * num_steps(declared)):
        needed = peak + codes_of_steps + beside
        assert needed <= promised
        assert needed == pytest.approx(promised, rel=0.02)
        assert needed == pytest.approx(report.stages[0].used_bytes, rel=0.02)


@pytest.mark.parametrize(
    ("slice_name", "num_shards", "decode_only"),
    [
        *(pytest.param("v5e-8", 8, only, marks=pytest.mark.sweep) for only in (True, False)),
        pytest.param("v6e-4", 4, True, marks=pytest.mark.sweep),
        ("v6e-4", 4, False),
    ],
)
def test_a_model_cut_over_chips_exchanges_two_sums_per_layer(
    slice_name, num_shards, decode_only, llama_3_8b
):
    num_layers = 2
    args = EngineArgs(
        model=llama_3_8b,
        hf_overrides={"num_hidden_layers": num_layers},
        max_num_seqs=64,
        max_num_batched_tokens=256,
        tensor_parallel_size=num_shards,
    )
    plan = make_plan(args, topology_devices(slice_name))
    declared = declare_programs(plan, make_packer(plan).layouts)
    num_tokens = 64 if decode_only else 256
    bucket = next(
        b for b in plan.buckets if (b.decode_only, b.num_tokens) == (decode_only, num_tokens)
    )
    compiled = Programs(declared)[bucket]
    weights, state, _ = declared[bucket].arguments
    hlo = compiled.as_text()
    assert not whole_array_copies(hlo, [*weights, *state.caches])
    # Of the activations; what the sampler exchanges is a few numbers per row.
    large = [c for c in collectives(hlo) if c.num_bytes >= num_tokens * 4096 * 2]
    assert [c.opcode for c in large] == ["all-reduce"] * (2 * num_layers + 1)
    assert compiled.memory_analysis().argument_size_in_bytes == pytest.approx(
        plan.weights_bytes + plan.kv_cache_bytes, rel=0.02
    )

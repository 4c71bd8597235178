"""A Llama-3-70B, cut over the chips of several TPU hosts that are not there."""

import importlib.util

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.cli.main import main
from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import declare_programs, make_packer
from jaxllm.programs.hlo import collectives, whole_array_copies
from jaxllm.programs.sizing import plan_engine
from tests.programs.late import late_rows_bytes, num_steps

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="no libtpu: nothing is compiled for TPUs (pip install '.[tpu]')",
    ),
]

HIDDEN_SIZE = 8192
NUM_LAYERS = 80
NUM_PARAMETERS = 70_553_706_496


def compile_step(model_dir, slice_name, *, num_layers, decode_only):
    """The plan for a slice and its largest step of a kind, compiled, after what holds for each."""
    devices = topology_devices(slice_name)
    assert len({device.process_index for device in devices}) > 1, "one host only"
    args = EngineArgs(
        model=model_dir,
        hf_overrides={"num_hidden_layers": num_layers},
        max_num_seqs=64,
        # Not 512: activations would have the shape of a matrix's share on 16 chips.
        max_num_batched_tokens=256,
        tensor_parallel_size=len(devices),
    )
    # A step of fewer layers is soon compiled once more, to know what programs need.
    is_sized = num_layers < NUM_LAYERS
    plan = plan_engine(args, devices) if is_sized else make_plan(args, devices)
    declared = declare_programs(plan, make_packer(plan).layouts)
    bucket = max(b for b in plan.buckets if b.decode_only == decode_only)
    program = declared[bucket]
    compiled = program.compile(program.lower())
    hlo = compiled.as_text()

    # Sums after the attention and the MLP of every layer, and of the embedding; all else that the
    # chips exchange is a few numbers per row, for the sampler.
    large = [c for c in collectives(hlo) if c.num_bytes >= bucket.num_tokens * HIDDEN_SIZE * 2]
    assert [c.opcode for c in large] == ["all-reduce"] * (2 * num_layers + 1)
    weights, state, _ = program.arguments
    assert not whole_array_copies(hlo, [*weights, *state.caches])

    memory = compiled.memory_analysis()
    counted = plan.weights_bytes + plan.kv_cache_bytes
    assert memory.argument_size_in_bytes == pytest.approx(counted, rel=0.02)
    # The cache is updated in place, and beside it only the sampler's state.
    assert memory.alias_size_in_bytes >= plan.kv_cache_bytes
    assert memory.alias_size_in_bytes == pytest.approx(plan.kv_cache_bytes, rel=0.02)
    code_bytes = memory.generated_code_size_in_bytes * num_steps(declared)
    needed = memory.peak_memory_in_bytes + code_bytes + late_rows_bytes(plan, declared)
    promised = plan.chip.hbm_bytes * args.cache.gpu_memory_utilization
    assert needed <= promised
    if is_sized:
        assert needed == pytest.approx(promised, rel=0.02)
    return plan


# All 80 layers take a decode step 25 CPU seconds, and a mixed one twice that. So the bytes of the
# whole model are those of the decode step; what a mixed step exchanges and copies, the same in
# every layer, is seen in two of full width.
@pytest.mark.sweep
@pytest.mark.parametrize(("slice_name", "num_shards"), [("v5p-16", 8), ("v6e-16", 16)])
def test_decode_step_of_all_layers(slice_name, num_shards, llama_3_70b):
    plan = compile_step(llama_3_70b, slice_name, num_layers=NUM_LAYERS, decode_only=True)
    assert plan.stages[0].mesh.size == num_shards
    # More than its share of the parameters are a chip's copies of kv heads, of which there are 8.
    copies = NUM_LAYERS * 2 * 8 * 128 * HIDDEN_SIZE * (num_shards // 8 - 1)
    in_all = 2 * (NUM_PARAMETERS + copies)
    assert plan.weights_bytes == pytest.approx(in_all / num_shards, rel=0.001)
    assert plan.kv_cache_bytes + plan.weights_bytes > 0.8 * plan.chip.hbm_bytes


@pytest.mark.sweep
@pytest.mark.parametrize("slice_name", ["v5p-16", "v6e-16"])
def test_mixed_step_of_two_layers(slice_name, llama_3_70b):
    compile_step(llama_3_70b, slice_name, num_layers=2, decode_only=False)


def test_four_small_chips_are_refused_with_what_is_missing(llama_3_70b, capsys):
    assert main(["plan", llama_3_70b, "--tpu", "v5e-4", "--max-num-seqs", "64"]) == 2
    message = capsys.readouterr().err
    assert "each device has 14.49 GiB free and needs 33.50 GiB: weights 32.86 GiB" in message
    assert "19.01 GiB are missing. Use more devices (tensor_parallel_size)" in message

"""The programs that move blocks and snapshots between a device that is not there and its host. They
change caches in place, and take no more memory than the blocks of a call."""

import importlib.util

import pytest
from jaxllm_kernels.topology import topology_devices

from jaxllm.config import EngineArgs
from jaxllm.plan.make_plan import make_plan
from jaxllm.programs.declare import BlocksKey, declare_programs, make_packer
from jaxllm.programs.hlo import whole_array_copies
from jaxllm.testing import make_tiny_checkpoint


def compiled_for(slice_name, marker, package, *marks):
    missing = importlib.util.find_spec(package) is None
    skip = pytest.mark.skipif(missing, reason=f"no {package}: nothing is compiled for {slice_name}")
    return pytest.param(slice_name, marks=[getattr(pytest.mark, marker), skip, *marks])


def nbytes(arrays):
    return sum(array.size * array.dtype.itemsize for array in arrays)


@pytest.mark.parametrize(
    "slice_name",
    [
        compiled_for("v6e-1", "tpu_compile", "libtpu"),
        compiled_for("v7x-8", "tpu_compile", "libtpu", pytest.mark.sweep),
        compiled_for("h200", "gpu_compile", "jax_cuda13_plugin"),
    ],
)
def test_moves_stay_in_place_and_take_the_blocks_of_a_call(tmp_path, slice_name):
    """Keys and values, and snapshots of states and convolutions."""
    sizes = {
        "head_dim": 128,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_value_heads": 16,
        "linear_num_key_heads": 8,
        "torch_dtype": "bfloat16",
    }
    model = make_tiny_checkpoint(tmp_path, "qwen3_next", **sizes)
    args = EngineArgs(
        str(model),
        max_model_len=1024,
        max_num_seqs=16,
        block_size=64,
        # Caches must not fit into a TPU's VMEM: XLA would move them there and back.
        num_gpu_blocks_override=8003,
        num_state_snapshots=301,
        kv_offloading_size=1.0,
    )
    plan = make_plan(args, topology_devices(slice_name)[:1])
    programs = declare_programs(plan, make_packer(plan).layouts)
    keys = [key for key in programs if isinstance(key, BlocksKey)]
    assert {(key.way, key.group) for key in keys} == {
        (way, group) for way in ("read", "write") for group in (0, 1)
    }
    for key in keys:
        program = programs[key]
        compiled = program.compile(program.lower())
        caches, _, *data = program.arguments
        memory = compiled.memory_analysis()
        outputs = memory.host_output_size_in_bytes or memory.output_size_in_bytes
        of_call = nbytes(data[0]) if data else outputs
        assert 1 << 20 < of_call < 1 << 22, (key, memory)
        assert not whole_array_copies(compiled.as_text(), caches), key
        # Twice the blocks of a call: those that move, and where they are put together.
        assert memory.temp_size_in_bytes <= 2 * of_call, (key, memory)
        if key.way == "write":
            assert memory.alias_size_in_bytes >= nbytes(caches), (key, memory)

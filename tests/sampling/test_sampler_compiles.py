"""The sampler alone, compiled for a TPU and for a GPU that are not there."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.platform import chip_of
from jaxllm_kernels.topology import topology_devices

from jaxllm.programs.hlo import whole_array_copies
from jaxllm.sampling import row_params
from jaxllm.sampling.layout import LAYOUTS
from jaxllm.sampling.sampler import sample
from jaxllm.sampling.slot_state import SlotState

VOCAB = 128_256
SLOTS = 256


def compile_for(slice_name, num_rows, **options):
    """The executable, and the shapes of logits and tables."""
    (device, *_) = topology_devices(slice_name)
    chip = chip_of(device)

    def step(logits, packed, slots, samples, output_index, positions, state):
        out = sample(
            logits,
            row_params.decode(packed),
            slots=slots,
            samples=samples,
            output_index=output_index,
            positions=positions,
            state=state,
            num_logprobs=20,
            layout=LAYOUTS[chip.platform],
        )
        return (out.tokens, out.is_valid, out.logprobs), out.state

    sharding = NamedSharding(Mesh([device], ("x",)), PartitionSpec())

    def shape(*axes, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(axes, dtype, sharding=sharding)

    logits = shape(num_rows, VOCAB, dtype=jnp.float32)
    columns = shape(num_rows, row_params.num_columns())
    state = jax.tree.map(
        lambda leaf: shape(*leaf.shape, dtype=leaf.dtype), SlotState.abstract(SLOTS, VOCAB, 8192)
    )
    rows = shape(num_rows)
    samples = shape(num_rows, dtype=jnp.bool_)
    traced = jax.jit(step, donate_argnums=6).trace(
        logits, columns, rows, samples, rows, rows, state
    )
    lowered = traced.lower(lowering_platforms=("cuda" if chip.platform == "gpu" else "tpu",))
    return lowered.compile(dict(chip.compiler_options) | options), logits, state


@pytest.mark.tpu_compile
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu")
def test_no_table_and_no_logits_of_all_rows_are_copied_on_a_tpu():
    compiled, logits, state = compile_for("v6e-1", 256)
    assert not whole_array_copies(compiled.as_text(), [logits, state.token_counts])
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= state.token_counts.size * 2
    # No more than the logits themselves; those of all rows at once would be nine times as much.
    assert memory.temp_size_in_bytes < logits.size * 4 * 1.25


@pytest.mark.gpu_compile
@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="no CUDA plugin")
def test_greedy_rows_take_few_launches_on_a_gpu(tmp_path):
    compile_for("h200", 64, xla_dump_to=str(tmp_path))
    (listing,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    launches = re.findall(r"^    \d+: (k\w+)", listing.read_text(), re.MULTILINE)
    # The arg-max takes two, the flags as many; all else is behind one conditional.
    assert launches.count("kConditional") == 1
    assert len(launches) <= 9

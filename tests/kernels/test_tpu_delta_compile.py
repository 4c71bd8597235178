"""The gated delta rule passes the TPU compilers: no states are gathered, copied or scattered, and
XLA computes no tiles."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.gated_delta.tpu import TpuDelta
from jaxllm_kernels.platform import chip_of
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.rows import prepare_rows
from jaxllm_kernels.topology import topology_devices

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="NOTHING IS COMPILED FOR TPUS: libtpu is not installed (pip install 'jax[tpu]')",
    ),
]

SLICES = {"v4": "v4-8", "v5e": "v5e-8", "v6e": "v6e-8", "v7x": "v7x-8"}
NUM_SLOTS = 96
LARGER = (128, 256), (256, 128), (256, 256)


def compile_delta(
    device,
    *,
    num_key_heads: int = 16,
    num_heads: int = 32,
    by_channel: bool = False,
    decode_only: bool = True,
    num_rows: int = 64,
    sizes: tuple[int, int] = (128, 128),
    with_tiles: bool = True,
) -> jax.stages.Compiled:
    """A layer's heads, whose keys and values have these sizes."""
    key_size, value_size = sizes
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    num_tokens = num_rows if decode_only else 512

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(operands, state, slots, query_starts, context_lens, num_decodes):
        batch = RaggedBatch(
            query_starts=query_starts,
            context_lens=context_lens,
            block_tables=jnp.zeros((num_rows, 0), jnp.int32),
            num_decodes=num_decodes,
            block_size=1,
            decode_only=decode_only,
        )
        rows = prepare_rows(batch, slots, num_tokens=num_tokens, num_slots=NUM_SLOTS)
        op = TpuDelta(chip=chip_of(device).name, with_tiles=with_tiles)
        if with_tiles:
            op.check_tiles(num_key_heads, num_heads, *sizes, by_channel=by_channel)
        return op(*operands, state, rows)

    operands = (
        array(num_tokens, num_key_heads, key_size),
        array(num_tokens, num_key_heads, key_size),
        array(num_tokens, num_heads, value_size, dtype=jnp.bfloat16),
        array(num_tokens, num_heads, *((key_size,) if by_channel else ())),
        array(num_tokens, num_heads),
    )
    counts = (array(size, dtype=jnp.int32) for size in (num_rows, num_rows + 1, num_rows))
    lowered = jax.jit(run, donate_argnums=1).lower(
        operands, array(NUM_SLOTS, num_heads, *sizes), *counts, array(dtype=jnp.int32)
    )
    return lowered.compile(dict(chip_of(device).compiler_options))


@pytest.mark.parametrize(
    ("chip", "options"),
    [
        ("v6e", {}),
        ("v6e", {"decode_only": False}),
        *(
            pytest.param(chip, options, marks=pytest.mark.sweep)
            for chip in SLICES
            for options in (
                {"decode_only": False},
                # Qwen3-Next cut over eight devices.
                {"num_key_heads": 2, "num_heads": 4},
                {"num_key_heads": 32, "by_channel": True},
                {"num_rows": 1},
            )
        ),
        *(
            pytest.param(chip, {**options, "decode_only": False}, marks=pytest.mark.sweep)
            for chip in ("v5e", "v6e", "v7x")
            for options in (
                {"num_key_heads": 32, "by_channel": True},
                {"num_key_heads": 2, "num_heads": 4},
                {"num_key_heads": 3, "num_heads": 15},
                *({"num_heads": 16, "sizes": sizes} for sizes in LARGER),
            )
        ),
    ],
    ids=str,
)
def test_no_row_gathers_or_copies_states(chip, options):
    with_tiles = chip != "v4" and "sizes" not in options
    compiled = compile_delta(topology_devices(SLICES[chip])[0], with_tiles=with_tiles, **options)
    num_heads, memory = options.get("num_heads", 32), compiled.memory_analysis()
    key_size, value_size = options.get("sizes", (128, 128))
    state_bytes = 4 * num_heads * key_size * value_size
    assert memory.alias_size_in_bytes == NUM_SLOTS * state_bytes
    if options.get("decode_only", True):
        # XLA's loop has the states of 32 rows beside.
        assert memory.temp_size_in_bytes < 2 * state_bytes
    text = compiled.as_text()
    made = re.findall(rf"= f32\[\d+,{num_heads},{key_size},{value_size}\]\S* ([\w-]+)\(", text)
    assert not {"copy", "copy-start", "gather"} & set(made)
    if not options.get("decode_only", True):
        assert ("delta_tiles" in text) is with_tiles
        assert (" while(" in text) is not with_tiles

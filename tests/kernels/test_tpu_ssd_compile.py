"""Mamba2's state space and the copies of states pass the TPU compilers: no array of states is
gathered, copied or scattered."""

import importlib.util
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxllm_kernels.causal_conv.tpu import TpuConv
from jaxllm_kernels.platform import chip_of
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.copies import TpuCopies
from jaxllm_kernels.recurrent.rows import prepare_rows
from jaxllm_kernels.ssd.tpu import TpuSsd
from jaxllm_kernels.topology import topology_devices

pytestmark = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="NOTHING IS COMPILED FOR TPUS: libtpu is not installed (pip install 'jax[tpu]')",
    ),
]

SLICES = {"v4": "v4-8", "v5e": "v5e-8", "v6e": "v6e-8", "v7x": "v7x-8"}
NUM_SLOTS, NUM_SNAPSHOTS, WIDTH = 96, 40, 4


class Heads(NamedTuple):
    """Heads of Mamba2 on one device."""

    heads: int
    groups: int
    head_size: int = 64
    state_size: int = 128


MODELS = {
    "Nemotron 3 Nano over eight": Heads(8, 1),
    "Granite 4.0 H Tiny": Heads(48, 1),
    "Nemotron 3 Nano": Heads(64, 8),
}
# Heads of a group are computed as one, two, three or four pairs at once; of 128 no more than two.
TILES = {
    "Granite 4.0 H Small": Heads(128, 1),
    "Nemotron 3 Super": Heads(128, 8),
    "Mamba2 2.7B over five": Heads(16, 1),
    "Falcon-H1 1.5B": Heads(48, 1, 64, 256),
    "Falcon-H1 34B": Heads(32, 2, 128, 256),
    "Falcon-H1 7B over four": Heads(6, 1, 128, 256),
    "two heads": Heads(2, 1),
    "two heads of 128": Heads(2, 1, 128),
    "four heads of a group": Heads(12, 3),
    "six heads of a group": Heads(12, 2, 64, 256),
    "the largest heads": Heads(128, 4, 128, 256),
}


def compile_mamba(
    device,
    heads: Heads = MODELS["Nemotron 3 Nano"],
    *,
    decode_only: bool = True,
    num_rows: int = 64,
    dtype=jnp.bfloat16,
    with_tiles: bool = True,
) -> jax.stages.Compiled:
    """A layer's copies of snapshots, convolution and state space."""
    sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    num_tokens = num_rows if decode_only else 512
    chip = chip_of(device)
    conv, copies = TpuConv(chip=chip.name), TpuCopies(chip=chip.name)
    ssd = TpuSsd(chip=chip.name, with_tiles=with_tiles)
    num_heads, num_groups, *of_head = heads
    sizes = num_heads * of_head[0], num_groups * of_head[1], num_groups * of_head[1]
    conv.check(sum(sizes))
    ssd.check(*of_head)
    if with_tiles:
        ssd.check_tiles(num_groups, num_heads, *of_head)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(xbc, step, rate, taps, states, snapshots, pairs, slots, starts, context_lens, counts):
        batch = RaggedBatch(
            query_starts=starts,
            context_lens=context_lens,
            block_tables=jnp.zeros((num_rows, 0), jnp.int32),
            num_decodes=counts[0],
            block_size=1,
            decode_only=decode_only,
        )
        rows = prepare_rows(batch, slots, num_tokens=num_tokens, num_slots=NUM_SLOTS)
        inputs, matrices = copies(snapshots, states, pairs, counts[1])
        xbc, inputs = conv(xbc, taps, None, inputs, rows, activation="silu")
        ends = [sizes[0], sizes[0] + sizes[1]]
        x, b, c = (
            part.reshape(num_tokens, -1, size)
            for part, size in zip(jnp.split(xbc, ends, axis=1), [*of_head, of_head[1]], strict=True)
        )
        out, matrices = ssd(x, b, c, step, rate, matrices, rows)
        return out, (inputs, matrices)

    def states(count):
        bits = jnp.uint16 if dtype == jnp.bfloat16 else dtype
        inputs = array(count, conv.num_inputs(WIDTH), sum(sizes), dtype=bits)
        return inputs, array(count, num_heads, *of_head)

    shapes = ((8, 2), (num_rows,), (num_rows + 1,), (num_rows,), (2,))
    integers = (array(*shape, dtype=jnp.int32) for shape in shapes)
    lowered = jax.jit(run, donate_argnums=4).lower(
        array(num_tokens, sum(sizes), dtype=dtype),
        array(num_tokens, num_heads),
        array(num_heads),
        array(WIDTH, sum(sizes), dtype=dtype),
        states(NUM_SLOTS),
        states(NUM_SNAPSHOTS),
        *integers,
    )
    return lowered.compile(dict(chip.compiler_options))


@pytest.mark.parametrize(
    ("chip", "model", "options"),
    [
        ("v6e", "Nemotron 3 Nano over eight", {}),
        ("v6e", "Nemotron 3 Nano over eight", {"decode_only": False}),
        *(
            pytest.param(chip, model, options, marks=pytest.mark.sweep)
            for chip in SLICES
            for model, options in (
                ("Nemotron 3 Nano", {}),
                ("Nemotron 3 Nano", {"decode_only": False}),
                ("Granite 4.0 H Tiny", {}),
                ("Granite 4.0 H Tiny", {"num_rows": 1}),
                ("Granite 4.0 H Tiny", {"dtype": jnp.float32}),
            )
        ),
    ],
    ids=str,
)
def test_no_decode_gathers_or_copies_states(chip, model, options):
    heads = MODELS[model]
    num_heads = heads.heads
    with_tiles = chip != "v4"
    device = topology_devices(SLICES[chip])[0]
    compiled = compile_mamba(device, heads, with_tiles=with_tiles, **options)
    num_channels = num_heads * 64 + 2 * heads.groups * 128
    itemsize = jnp.dtype(options.get("dtype", jnp.bfloat16)).itemsize
    input_bytes, state_bytes = 4 * num_channels * itemsize, 4 * num_heads * 64 * 128
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes == NUM_SLOTS * (input_bytes + state_bytes)
    arrays = rf"\w+\[{NUM_SLOTS},(?:4,{num_channels}|{num_heads},64,128)\](\S*) ([\w-]+)\("
    made = re.findall(rf"= {arrays}", hlo)
    assert made
    for layout, opcode in made:
        assert opcode not in {"copy", "copy-start", "copy-done", "gather", "scatter", "transpose"}
        assert "S(1)" not in layout, "an array of all slots is in VMEM"
    if options.get("decode_only", True):
        # XLA's loop has the states of 32 rows beside.
        num_rows = options.get("num_rows", 64)
        assert memory.temp_size_in_bytes < 4 * num_rows * input_bytes + 4 * state_bytes
    else:
        assert ("ssd_tiles" in hlo) is with_tiles
        assert (" while(" in hlo) is not with_tiles


@pytest.mark.parametrize(
    ("chip", "model", "options"),
    [
        pytest.param(chip, model, options, marks=pytest.mark.sweep)
        for chip in ("v5e", "v6e", "v7x")
        for model, options in (
            *((model, {}) for model in TILES),
            ("Granite 4.0 H Small", {"dtype": jnp.float32}),
            ("Falcon-H1 34B", {"dtype": jnp.float32}),
        )
    ],
    ids=str,
)
def test_tiles_are_computed_by_the_kernel(chip, model, options):
    device = topology_devices(SLICES[chip])[0]
    hlo = compile_mamba(device, TILES[model], decode_only=False, **options).as_text()
    assert "ssd_tiles" in hlo
    assert " while(" not in hlo

"""Mamba2's state space on TPUs, emulated on a CPU: results, races, and rows that are skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.cases import CASES
from jaxllm_kernels.recurrent.rows import prepare_rows
from jaxllm_kernels.recurrent.scan import AtOnce
from jaxllm_kernels.ssd.cases import TOLERANCE, Layer, draw, error
from jaxllm_kernels.ssd.tpu import TpuSsd
from jaxllm_kernels.ssd.xla import XlaSsd

pytestmark = pytest.mark.usefixtures("no_races")

# Blocks of two heads of 64 x 128.
OP = TpuSsd(chip="v6e", interpret=True, block_bytes=1 << 16)
WHOLE = TpuSsd(chip="v6e", interpret=True)
TWO_CORES = TpuSsd(chip="v4", interpret=True, with_tiles=False)
LAYERS = {
    # A block has a part of a group.
    "usual": Layer(num_groups=1, head_size=64, state_size=128),
    # Three heads do not fill rows of 128.
    "odd heads": Layer(num_groups=1, num_heads=3, head_size=64, state_size=128),
    "groups": Layer(num_groups=2, num_heads=4, head_size=32, state_size=256),
    "large heads": Layer(num_groups=4, num_heads=4, head_size=128, state_size=128),
    "wide": Layer(num_groups=2, num_heads=8, head_size=128, state_size=256),
    "more heads than at once": Layer(num_groups=2, num_heads=24, head_size=64, state_size=128),
    "long steps": Layer(head_size=64, state_size=128, num_heads=4, longest_step=200.0),
    "tiny steps": Layer(head_size=64, state_size=128, num_heads=4, longest_step=1e-4),
}
TILED = "usual", "wide", "more heads than at once", "long steps", "tiny steps"
# A slot that a later request takes is not read.
ALWAYS = [
    ("slots pass on", "usual", OP),
    ("decodes", "groups", WHOLE),
    ("borders of tiles", "wide", OP),
    ("borders of tiles", "more heads than at once", OP),
]


@pytest.mark.parametrize(
    ("name", "layer", "op"),
    [
        *ALWAYS,
        *(
            pytest.param(*it, marks=pytest.mark.sweep)
            for it in (
                *((name, "usual", OP) for name in CASES),
                *(("borders of tiles", layer, OP) for layer in TILED[1:]),
                *(("decodes", layer, op) for layer in LAYERS for op in (OP, WHOLE, TWO_CORES)),
            )
            if it not in ALWAYS
        ),
    ],
    ids=lambda value: f"{value.chip} {value.block_bytes}" if isinstance(value, TpuSsd) else value,
)
def test_cases(name, layer, op):
    assert error(op, name, LAYERS[layer]) < TOLERANCE


def test_rows_without_a_slot_change_no_state():
    # Skipped ones come first, between others and last; 4 is no slot.
    slots = (4, 4, 2, 4, 0, 4)
    layer, num_rows, num_slots = LAYERS["odd heads"], 6, 4
    random = np.random.default_rng(0)
    shape = (num_slots, layer.num_heads, layer.head_size, layer.state_size)
    state = jnp.asarray(random.normal(size=shape), jnp.float32)
    operands = (*map(jnp.asarray, draw(layer, random, num_rows)), jnp.asarray(layer.rate))
    batch = RaggedBatch(
        query_starts=jnp.arange(num_rows + 1, dtype=jnp.int32),
        context_lens=jnp.full(num_rows, 9),
        block_tables=jnp.zeros((num_rows, 0), jnp.int32),
        num_decodes=jnp.int32(num_rows - 1),
        block_size=1,
        decode_only=True,
    )
    rows = prepare_rows(batch, jnp.array(slots), num_tokens=num_rows, num_slots=num_slots)
    (out, after), (right, expected) = (
        jax.jit(op)(*operands, state, rows) for op in (OP, XlaSsd(at_once=AtOnce(8)))
    )
    its = jnp.array([row for row in range(num_rows - 1) if slots[row] < num_slots])
    np.testing.assert_allclose(out[its], right[its], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(after, expected, atol=1e-5)
    assert np.isfinite(out).all()
    others = jnp.array([slot for slot in range(num_slots) if slot not in slots])
    np.testing.assert_array_equal(after[others], state[others])


def test_tiles_of_bfloat16_are_as_precise_as_float32():
    # Float32 in two parts of bfloat16 errs more.
    assert error(OP, "whole", LAYERS["usual"], "bfloat16") < TOLERANCE / 10


def test_rows_alone_have_the_bits_that_they_have_in_a_crowd():
    layer, num_tokens, num_slots = LAYERS["usual"], 160, 5
    random = np.random.default_rng(0)
    shape = (num_slots, layer.num_heads, layer.head_size, layer.state_size)
    state = jnp.asarray(random.normal(size=shape), jnp.float32)
    tokens = draw(layer, random, num_tokens)

    @jax.jit
    def compute(operands, lengths, contexts, slots):
        batch = RaggedBatch(
            query_starts=jnp.concatenate([jnp.zeros(1, jnp.int32), lengths.cumsum()]),
            context_lens=contexts,
            block_tables=jnp.zeros((len(lengths), 0), jnp.int32),
            num_decodes=jnp.int32(0),
            block_size=1,
            decode_only=False,
        )
        rows = prepare_rows(batch, slots, num_tokens=num_tokens, num_slots=num_slots)
        return OP(*operands, jnp.asarray(layer.rate), state, rows)

    def run(rows, first_token):
        """Each row is its tokens, those before them, and its slot."""
        numbers = np.zeros((4, 3), np.int32)
        numbers[: len(rows)] = rows
        operands = [np.roll(x, -first_token, axis=0) for x in tokens]
        lengths, before, slots = numbers.T
        return jax.block_until_ready(compute(operands, lengths, lengths + before, slots))

    # The second row has no slot, and is computed as if it began.
    rows = ((13, 0, 3), (5, 9, num_slots), (70, 9, 0), (9, 9, 2))
    out, after = run(rows, 0)
    np.testing.assert_array_equal(after[jnp.array([1, 4])], state[jnp.array([1, 4])])
    starts = 0, 13, 18, 88
    for (length, before, slot), first in zip(rows, starts, strict=True):
        has_slot = slot < num_slots
        alone = (length, before, slot) if has_slot else (length, 0, 1)
        own, states = run([alone], first)
        np.testing.assert_array_equal(out[first : first + length], own[:length])
        if has_slot:
            np.testing.assert_array_equal(after[slot], states[slot])

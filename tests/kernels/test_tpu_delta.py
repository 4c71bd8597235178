"""The gated delta rule on TPUs, emulated on a CPU: results, races, and rows that are skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.gated_delta.cases import TOLERANCE, Layer, draw, error
from jaxllm_kernels.gated_delta.tpu import TpuDelta
from jaxllm_kernels.gated_delta.xla import XlaDelta
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.cases import CASES
from jaxllm_kernels.recurrent.rows import prepare_rows
from jaxllm_kernels.recurrent.scan import AtOnce

pytestmark = pytest.mark.usefixtures("no_races")

# Blocks of two heads.
OP = TpuDelta(chip="v6e", interpret=True, block_bytes=1 << 17)
TWO_CORES = TpuDelta(chip="v4", interpret=True, with_tiles=False)
LAYERS = {
    "usual": Layer(key_size=128, value_size=128),
    "narrow, by channel": Layer(
        num_key_heads=4, decays_by_channel=True, key_size=128, value_size=128
    ),
    "by channel": Layer(num_key_heads=4, decays_by_channel=True, key_size=128, value_size=256),
    "more heads of a key": Layer(num_key_heads=1, key_size=256, value_size=128),
    "more heads than at once": Layer(num_key_heads=4, num_heads=8, key_size=128, value_size=128),
    "three heads of a key": Layer(num_key_heads=2, num_heads=6, key_size=128, value_size=128),
}
ALWAYS = (
    # A slot that a later request takes is not read.
    ("slots pass on", "usual", OP),
    ("borders of tiles", "narrow, by channel", OP),
    ("borders of tiles", "more heads than at once", OP),
)


@pytest.mark.parametrize(
    ("name", "layer", "op"),
    [
        pytest.param(*it, marks=[] if it in ALWAYS else pytest.mark.sweep)
        for it in (
            *((name, layer, OP) for name in CASES for layer in ("usual", "narrow, by channel")),
            *(("borders of tiles", layer, OP) for layer in list(LAYERS)[-2:]),
            *(("decodes", layer, op) for layer in LAYERS for op in (OP, TWO_CORES)),
        )
    ],
    ids=lambda value: value.chip if isinstance(value, TpuDelta) else value,
)
def test_cases(name, layer, op):
    assert error(op, name, LAYERS[layer]) < TOLERANCE


@pytest.mark.parametrize(
    "slots",
    [
        # Skipped ones come first, between others and last; 4 is no slot.
        (4, 4, 2, 4, 0, 4),
        pytest.param((4,) * 6, marks=pytest.mark.sweep),
    ],
)
def test_rows_without_a_slot_change_no_state(slots):
    layer, num_rows, num_slots = LAYERS["by channel"], 6, 4
    random = np.random.default_rng(0)
    shape = (num_slots, layer.num_heads, layer.key_size, layer.value_size)
    state = jnp.asarray(random.normal(size=shape), jnp.float32)
    operands = draw(layer, random, num_rows)
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
        jax.jit(op)(*map(jnp.asarray, operands), state, rows)
        for op in (OP, XlaDelta(at_once=AtOnce(8)))
    )
    its = [row for row in range(num_rows - 1) if slots[row] < num_slots]
    np.testing.assert_allclose(out[jnp.array(its, int)], right[jnp.array(its, int)], atol=1e-5)
    np.testing.assert_allclose(after, expected, atol=1e-5)
    assert np.isfinite(out).all()
    others = [slot for slot in range(num_slots) if slot not in slots]
    np.testing.assert_array_equal(after[jnp.array(others)], state[jnp.array(others)])

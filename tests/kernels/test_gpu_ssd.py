"""Mamba2 on GPUs, emulated on a CPU: results, races, rows that are skipped, and borders of
chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.recurrent.cases import CASES, Case
from jaxllm_kernels.recurrent.gpu_parts import rows_in_turn, rows_of_part
from jaxllm_kernels.recurrent.rows import prepare_rows
from jaxllm_kernels.recurrent.scan import AtOnce
from jaxllm_kernels.ssd.cases import TOLERANCE, Layer, draw, error, outputs
from jaxllm_kernels.ssd.gpu import MosaicSsd
from jaxllm_kernels.ssd.xla import XlaSsd

from tests.kernels.mixed_rows import assert_as_xla

no_mosaic = why_no_mosaic_gpu()
needs_mosaic = pytest.mark.skipif(bool(no_mosaic), reason=f"JAX for Mosaic GPU kernels {no_mosaic}")

# Fewer workers than there are items, each of which then has several.
OP = MosaicSsd(num_workers=3, interpret=True)
LAYERS = {
    "usual": Layer(num_groups=1, num_heads=2, head_size=32, state_size=32),
    "of two parts": Layer(num_groups=2, num_heads=2, head_size=128, state_size=128),
}


@pytest.fixture(autouse=True)
def no_races(capfd):
    yield
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err


@needs_mosaic
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "layer"),
    [
        *((name, "usual") for name in CASES),
        *((name, "of two parts") for name in ("decodes", "borders of tiles", "drafts")),
    ],
)
def test_cases(name, layer):
    assert error(OP, name, LAYERS[layer]) < TOLERANCE


@needs_mosaic
def test_decodes_alone_change_their_states():
    """Of four rows the first has no slot, and the last is no decode."""
    layer, slots, num_slots = LAYERS["usual"], (4, 2, 0, 1), 4
    num_rows = len(slots)
    random = np.random.default_rng(0)
    shape = (num_slots, layer.num_heads, layer.head_size, layer.state_size)
    state = jnp.asarray(random.normal(size=shape), jnp.float32)
    # The row of this slot begins a request, whatever the slot has.
    state = state.at[0].set(jnp.nan)
    operands = [jnp.asarray(x).at[3].set(jnp.nan) for x in draw(layer, random, num_rows)]
    batch = RaggedBatch(
        query_starts=jnp.arange(num_rows + 1, dtype=jnp.int32),
        context_lens=jnp.array([9, 9, 1, 9]),
        block_tables=jnp.zeros((num_rows, 0), jnp.int32),
        num_decodes=jnp.int32(num_rows - 1),
        block_size=1,
        decode_only=True,
    )
    rows = prepare_rows(batch, jnp.array(slots), num_tokens=num_rows, num_slots=num_slots)
    (out, after), (right, expected) = (
        jax.jit(op)(*operands, jnp.asarray(layer.rate), state, rows)
        for op in (OP, XlaSsd(at_once=AtOnce(8)))
    )
    np.testing.assert_allclose(out[1:3], right[1:3], atol=1e-5)
    np.testing.assert_array_equal(out[jnp.array([0, 3])], 0)
    np.testing.assert_allclose(after, expected, atol=1e-5)
    np.testing.assert_array_equal(after[jnp.array([1, 3])], state[jnp.array([1, 3])])


@needs_mosaic
@pytest.mark.parametrize("num_tokens", [46, 50])
def test_rows_of_several_tokens_change_their_states(num_tokens):
    """With and without padding, and a row that has tokens and no slot."""
    layer = LAYERS["usual"]
    assert_as_xla(
        *(
            lambda operands, state, rows, op=op: op(*operands, jnp.asarray(layer.rate), state, rows)
            for op in (OP, XlaSsd(at_once=AtOnce(8, 2)))
        ),
        functools.partial(draw, layer),
        (layer.num_heads, layer.head_size, layer.state_size),
        num_tokens,
    )


@needs_mosaic
@pytest.mark.sweep
@pytest.mark.parametrize("cut", [2, 31, 32, 33, 63, 64, 65])
def test_borders_of_chunks_change_no_bit(cut):
    whole = Case(steps=(((0, 130),),))
    cut = Case(steps=(((0, cut),), ((0, 130 - cut),)))
    (in_pieces,), (at_once,) = (
        outputs(OP, case, LAYERS["usual"]).values() for case in (cut, whole)
    )
    np.testing.assert_array_equal(in_pieces, at_once)


@pytest.mark.parametrize(
    ("rows", "columns", "expected"), [(64, 128, 32), (64, 256, 32), (128, 128, 32), (96, 64, 32)]
)
def test_a_part_that_goes_from_token_to_token_is_smaller(rows, columns, expected):
    assert rows_in_turn(rows, columns) == expected


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [(64, 128, 64), (128, 128, 64), (64, 256, 32), (80, 96, 80), (32, 32, 32)],
)
def test_a_part_is_what_a_warpgroup_holds(rows, columns, expected):
    assert rows_of_part(rows, columns) == expected


# The last three are refused for rows of several tokens alone.
@pytest.mark.parametrize(
    ("rows", "columns"),
    [*((64, 100), (40, 128), (8, 128), (16, 32), (16, 1024)), *((80, 96), (16, 128), (32, 512))],
)
def test_other_states_are_refused(rows, columns):
    with pytest.raises(ValueError, match=f"no part of a state of {rows} x {columns}"):
        MosaicSsd().check(rows, columns)


def test_tpus_are_refused():
    with pytest.raises(ValueError, match="it runs on Hopper GPUs .* not on v6e"):
        MosaicSsd.tuned_for(CHIPS["v6e"])

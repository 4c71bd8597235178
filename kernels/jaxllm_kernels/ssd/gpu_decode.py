"""The GPU kernel for decodes of Mamba2: each state is read once and written once.

A thread block has some rows of a head's matrix, one for each of the head's inputs. Rows do not
depend on each other. They lie along warps and lanes, and columns along lanes and registers. So an
output, which is a sum over columns, is one over registers and eight lanes, in an order that no
other row of the step changes.

Roofline: the states of the step's decodes, read and written.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.compat import store_unoptimized
from jaxllm_kernels.recurrent.gpu_parts import (
    LANE_ROWS,
    LANES,
    SKIP,
    VECTOR,
    WARPS,
    load_float32,
    places_of_decodes,
    rows_of_part,
)
from jaxllm_kernels.recurrent.rows import StateRows


def run_decodes(
    operands: tuple[jax.Array, ...], state: jax.Array, rows: StateRows, *, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Compute the decodes; return their outputs, float32 [up to T, N, P], zeros for other rows, and
    the states, updated in place. `operands` are those of `ssd.xla`."""
    x, b, c, step, log_decay = operands
    num_slots, num_heads, head_size, state_size = state.shape
    num_rows = min(len(x), len(rows.slots))
    heads_of_group = num_heads // b.shape[1]
    inputs = rows_of_part(head_size, state_size)
    shape = inputs, state_size
    matrix = _layout(*shape)
    per_input, per_column = matrix.reduce(1), matrix.reduce(0)

    def kernel(places_ref, x_ref, b_ref, c_ref, step_ref, decay_ref, state_ref, out_ref):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        group = lax.div(head, jnp.int32(heads_of_group))
        own = pl.ds(pl.multiple_of(lax.axis_index("part") * inputs, inputs), inputs)
        place = places_ref[row]

        @pl.when(place != SKIP)
        def _():
            slot, begins = lax.div(place, jnp.int32(2)), lax.rem(place, jnp.int32(2)) > 0
            matrix_ref = state_ref.at[slot, head, own]
            # A select also replaces NaN.
            held = jnp.where(jnp.full(shape, begins), 0.0, load_float32(matrix_ref, matrix))
            added = step_ref[row, head] * load_float32(x_ref.at[row, head, own], per_input)
            added = lax.broadcast_in_dim(added, shape, [0])
            into, out_of = (
                lax.broadcast_in_dim(load_float32(ref.at[row, group], per_column), shape, [1])
                for ref in (b_ref, c_ref)
            )
            held = decay_ref[row, head] * held + added * into
            store_unoptimized(matrix_ref, held)
            store_unoptimized(out_ref.at[row, head, own], (held * out_of).sum(axis=1))

        @pl.when(place == SKIP)
        def _():
            zeros = plgpu.layout_cast(jnp.zeros(inputs, jnp.float32), per_input)
            store_unoptimized(out_ref.at[row, head, own], zeros)

    states = jax.new_ref(state)
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows, num_heads, head_size), jnp.float32),
        grid=(num_rows, num_heads, head_size // inputs),
        grid_names=("row", "head", "part"),
        interpret=interpret,
        kernel_name="ssd_decode",
    )(places_of_decodes(rows, num_rows, num_slots), x, b, c, step, jnp.exp(log_decay), states)
    return out, jax.freeze(states)


def _layout(num_rows: int, num_columns: int) -> Any:
    """A warp has consecutive rows: four at a time, with eight lanes along each."""
    beside = VECTOR * LANES // LANE_ROWS
    tiles = (
        (num_rows, num_columns),
        (num_rows // WARPS, num_columns),
        (LANE_ROWS, beside),
        (VECTOR,),
    )
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-7,), lane_dims=(-3, -2), vector_dim=-1
    )

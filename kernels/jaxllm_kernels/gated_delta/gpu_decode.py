"""The GPU kernel for decodes of the gated delta rule: each state is read once and written once.

A thread block has some columns of a head's matrix, which do not depend on the others: a column is
corrected by what it holds of the key itself. Rows, which belong to keys, lie along warps and
registers, and columns along lanes. So a sum over keys is one over registers, a few lanes and four
warps, in an order that no other row of the step changes.

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
    LANES,
    SKIP,
    VECTOR,
    WARPS,
    columns_of_part,
    load_float32,
    places_of_decodes,
)
from jaxllm_kernels.recurrent.rows import StateRows


def run_decodes(
    operands: tuple[jax.Array, ...], state: jax.Array, rows: StateRows, *, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """Compute the decodes; return their outputs, float32 [up to T, N, V], zeros for other rows, and
    the states, updated in place. `operands` are those of `api.DeltaOp`."""
    q, k, v, log_decay, beta = operands
    num_slots, num_heads, key_size, value_size = state.shape
    num_rows = min(len(q), len(rows.slots))
    heads_of_key = num_heads // q.shape[1]
    by_channel = log_decay.ndim == 3
    columns = columns_of_part(key_size, value_size)
    shape = key_size, columns
    matrix = _layout(*shape)
    per_key, per_value = matrix.reduce(1), matrix.reduce(0)

    def over_columns(x):
        return lax.broadcast_in_dim(x, shape, [0])

    def kernel(places_ref, q_ref, k_ref, v_ref, decay_ref, beta_ref, state_ref, out_ref):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        of_key = lax.div(head, jnp.int32(heads_of_key))
        own = pl.ds(pl.multiple_of(lax.axis_index("part") * columns, columns), columns)
        place = places_ref[row]

        @pl.when(place != SKIP)
        def _():
            slot, begins = lax.div(place, jnp.int32(2)), lax.rem(place, jnp.int32(2)) > 0
            matrix_ref = state_ref.at[slot, head, :, own]
            # A select also replaces NaN.
            held = jnp.where(jnp.full(shape, begins), 0.0, load_float32(matrix_ref, matrix))
            key, query = (
                over_columns(load_float32(ref.at[row, of_key], per_key)) for ref in (k_ref, q_ref)
            )
            value = load_float32(v_ref.at[row, head, own], per_value)
            if by_channel:
                decay = over_columns(load_float32(decay_ref.at[row, head], per_key))
            else:
                decay = decay_ref[row, head]
            held = decay * held
            change = beta_ref[row, head] * (value - (held * key).sum(axis=0))
            held = held + key * lax.broadcast_in_dim(change, shape, [1])
            store_unoptimized(matrix_ref, held)
            store_unoptimized(out_ref.at[row, head, own], (held * query).sum(axis=0))

        @pl.when(place == SKIP)
        def _():
            zeros = plgpu.layout_cast(jnp.zeros(columns, jnp.float32), per_value)
            store_unoptimized(out_ref.at[row, head, own], zeros)

    states = jax.new_ref(state)
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows, num_heads, value_size), jnp.float32),
        grid=(num_rows, num_heads, value_size // columns),
        grid_names=("row", "head", "part"),
        interpret=interpret,
        kernel_name="delta_decode",
    )(places_of_decodes(rows, num_rows, num_slots), q, k, v, jnp.exp(log_decay), beta, states)
    return out, jax.freeze(states)


def _layout(num_rows: int, num_columns: int) -> Any:
    """A warp has consecutive rows, and so has a thread: numbers of keys are loaded four at once."""
    lane_rows = LANES * VECTOR // num_columns
    rows_of_warp = num_rows // WARPS
    tiles = (
        (num_rows, num_columns),
        (rows_of_warp, num_columns),
        (rows_of_warp // lane_rows, VECTOR),
    )
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-6,), lane_dims=(-4, -3), vector_dim=-1
    )

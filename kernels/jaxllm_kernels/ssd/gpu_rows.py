"""The GPU kernel for rows of several tokens of Mamba2.

A thread block has some rows of a head's matrix, one for each of the head's inputs, and a warp has
rows of its own. So a sum over columns is one over registers and eight lanes. It is of the state
before the token, and no token waits for the sum of another one:

    out = e^g S c + (b . c) step x, S <- e^g S + step x b^T

Roofline: the multiplications and additions, three for each number of the state and token.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.recurrent.gpu_parts import (
    LANES,
    TURN_LANES,
    VECTOR,
    WARPS,
    load_float32,
    rows_in_turn,
)
from jaxllm_kernels.recurrent.gpu_rows import Operand
from jaxllm_kernels.recurrent.gpu_rows import run_rows as run_rows_of
from jaxllm_kernels.recurrent.rows import StateRows


def run_rows(
    operands: tuple[jax.Array, ...],
    out: jax.Array,
    state: jax.Array,
    rows: StateRows,
    *,
    num_workers: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute the rows that are no decodes; return the outputs, float32 [T, N, P], and the states,
    both updated in place. `operands` are those of `ssd.xla`."""
    x, b, c, step, log_decay = operands
    head_size, state_size = state.shape[2:]
    part = rows_in_turn(head_size, state_size), state_size
    layout = _layout(*part)
    per_input, per_column = layout.reduce(1), layout.reduce(0)

    def advance(held, x_ref, b_ref, c_ref, scalars):
        step, product, decay = scalars[0], scalars[1], scalars[2]
        added = step * load_float32(x_ref, per_input)
        into, out_of = (
            lax.broadcast_in_dim(load_float32(ref, per_column), part, [1]) for ref in (b_ref, c_ref)
        )
        out = decay * (held * out_of).sum(axis=1) + product * added
        return decay * held + lax.broadcast_in_dim(added, part, [0]) * into, out

    product = (b.astype(jnp.float32) * c.astype(jnp.float32)).sum(axis=-1)
    product = jnp.repeat(product, x.shape[1] // b.shape[1], axis=1)
    # A copy takes 16 bytes, or a multiple.
    scalars = [step, product, jnp.exp(log_decay), jnp.zeros_like(step)]
    return run_rows_of(
        advance,
        [
            Operand(x, is_cut=True),
            # In 16 bits a warp takes 195 instructions for a token, and not 151: each thread would
            # widen the numbers of its columns again for each token, head and part.
            *(Operand(each.astype(jnp.float32)) for each in (b, c)),
            Operand(jnp.stack(scalars, axis=-1)),
        ],
        out,
        state,
        rows,
        layout=layout,
        part=part,
        axis=0,
        num_workers=num_workers,
        interpret=interpret,
        name="ssd_rows",
    )


def _layout(num_rows: int, num_columns: int) -> Any:
    """A warp has rows of its own. Its lanes have rows below each other, and columns beside."""
    of_warp, beside = num_rows // WARPS, num_columns // TURN_LANES
    tiles: list[tuple[int, ...]] = [
        (num_rows, num_columns),
        (of_warp, num_columns),
        (of_warp * TURN_LANES // LANES, beside),
    ]
    # Mosaic refuses a tile of a whole axis of the tile before it.
    if beside != VECTOR:
        tiles.append((VECTOR,))
    # Behind the lanes' two axes are rows, vectors if a lane has several beside, and a vector.
    behind = 2 + (beside != VECTOR)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tuple(tiles)),
        warp_dims=(-behind - 4,),
        lane_dims=(-behind - 2, -behind - 1),
        vector_dim=-1,
    )

"""The GPU kernel for rows of several tokens of the gated delta rule.

A thread block has some columns of a head's matrix, which do not depend on each other, and a warp
has columns of its own. So a sum over keys is one over registers and eight lanes. Products are
on CUDA cores, in float32. On tensor cores they would take tiles, and so the inverse of a matrix.

Both sums of a token, with its key and with its query, are of the state before its change. So it
waits once for the three steps across lanes, and not twice:

    S <- e^g S, had = S^T k, seen = S^T q
    change = beta (v - had), out = seen + (q . k) change, S <- S + k change^T

Roofline: the multiplications and additions, four for each number of the state and token.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.recurrent.gpu_parts import (
    LANES,
    TURN_LANES,
    WARPS,
    columns_in_turn,
    load_float32,
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
    """Compute the rows that are no decodes; return the outputs, float32 [T, N, V], and the states,
    both updated in place. `operands` are those of `api.DeltaOp`."""
    q, k, v, log_decay, beta = operands
    key_size, value_size = state.shape[2:]
    by_channel = log_decay.ndim == 3
    part = key_size, columns_in_turn(key_size, value_size)
    layout = _layout(*part)
    per_key, per_value = layout.reduce(1), layout.reduce(0)

    def over_columns(x):
        return lax.broadcast_in_dim(x, part, [0])

    def advance(held, q_ref, k_ref, v_ref, scalars, *channels):
        query, key = (over_columns(load_float32(ref, per_key)) for ref in (q_ref, k_ref))
        value, factor, product = load_float32(v_ref, per_value), scalars[0], scalars[1]
        decay = over_columns(load_float32(channels[0], per_key)) if by_channel else scalars[2]
        decayed = decay * held
        had, seen = ((decayed * x).sum(axis=0) for x in (key, query))
        change = factor * (value - had)
        held = decayed + key * lax.broadcast_in_dim(change, part, [1])
        return held, seen + product * change

    decays = jnp.exp(log_decay)
    product = (q.astype(jnp.float32) * k.astype(jnp.float32)).sum(axis=-1)
    product = jnp.repeat(product, v.shape[1] // k.shape[1], axis=1)
    nothing = jnp.zeros_like(beta)  # a copy takes 16 bytes, or a multiple
    scalars = [beta, product, nothing if by_channel else decays, nothing]
    of_tokens = [Operand(q), Operand(k), Operand(v, is_cut=True)]
    of_tokens += [Operand(jnp.stack(scalars, axis=-1))]
    of_tokens += [Operand(decays)] if by_channel else []
    return run_rows_of(
        advance,
        of_tokens,
        out,
        state,
        rows,
        layout=layout,
        part=part,
        axis=1,
        num_workers=num_workers,
        interpret=interpret,
        name="delta_rows",
    )


def _layout(num_rows: int, num_columns: int) -> Any:
    """A warp has columns of its own. Its lanes have rows below each other, and columns beside."""
    of_warp = num_columns // WARPS
    tiles = (
        (num_rows, num_columns),
        (num_rows, of_warp),
        (num_rows // TURN_LANES, of_warp * TURN_LANES // LANES),
    )
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-5,), lane_dims=(-4, -3), vector_dim=-1
    )

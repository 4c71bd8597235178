"""The TPU kernel for decodes of the gated delta rule: each state is read once and written once.

The grid walks over blocks of heads and over the decodes. Keys of a state lie along sublanes, and
values along lanes. So sums over keys stay within registers, and keys and queries are turned from
lanes to sublanes, once for all heads that share them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.recurrent.tpu_blocks import BEGIN, SKIP, heads_of_block, rows_of_decodes

# A reference to a kernel's operand.
Ref = Any

# Registers have so many rows of keys before they are turned.
_SUBLANES = 8


def run_decodes(
    operands: tuple[jax.Array, ...],
    state: jax.Array,
    rows: StateRows,
    *,
    chip: Chip,
    block_bytes: int | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute the decodes; return their outputs, float32 [up to T, N, V], which of other rows are
    anything, and the states, updated in place. `operands` are those of `api.DeltaOp`."""
    num_slots, num_heads, key_size, value_size = state.shape
    num_rows = min(len(operands[0]), len(rows.slots))
    q, k, v, log_decay, beta = (x[:num_rows].astype(jnp.float32) for x in operands)
    num_key_heads = q.shape[1]
    heads_of_key = num_heads // num_key_heads
    heads = heads_of_block(num_heads, heads_of_key, 4 * key_size * value_size, chip, block_bytes)
    num_blocks = num_heads // heads
    by_channel = log_decay.ndim == 3
    decay = jnp.exp(log_decay)
    product = jnp.repeat((q * k).sum(axis=2), heads_of_key, axis=1)
    numbers = [beta, product] if by_channel else [beta, product, decay]

    def by_block(x: jax.Array) -> jax.Array:
        return x.reshape(num_rows, num_blocks, -1, x.shape[-1])

    arrays = [by_block(q), by_block(k), by_block(v)] + ([by_block(decay)] if by_channel else [])
    numbers = jnp.concatenate([x.reshape(num_rows, num_blocks, 1, heads) for x in numbers], axis=3)

    def of_row(x: jax.Array, **where: Any) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, *x.shape[2:]), lambda j, i, *_: (i, j, 0, 0), **where)

    of_slot = pl.BlockSpec(
        (1, heads, key_size, value_size), lambda j, i, slots, what: (slots[i], j, 0, 0)
    )
    its = rows_of_decodes(rows, num_rows, num_slots)
    after = jax.ShapeDtypeStruct(state.shape, state.dtype)
    if not interpret:
        # Otherwise XLA moves the states of all slots into VMEM and back, where these are small.
        state = pltpu.with_memory_space_constraint(state, pltpu.HBM)
        after = pltpu.HBM(state.shape, state.dtype)
    num_elements = num_rows * num_heads * key_size * value_size
    out, state = pl.pallas_call(
        functools.partial(_step, heads_of_key=heads_of_key, by_channel=by_channel),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_blocks, its.num_rows),
            in_specs=[of_row(numbers, memory_space=pltpu.SMEM), *map(of_row, arrays), of_slot],
            out_specs=[of_row(by_block(v)), of_slot],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(by_block(v).shape, jnp.float32),
            after,
        ],
        input_output_aliases={3 + len(arrays): 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=8 * num_elements, transcendentals=0, bytes_accessed=8 * num_elements
        ),
        interpret=interpret,
        name="delta_decode",
    )(its.slots, its.what, numbers, *arrays, state)
    return out.reshape(num_rows, num_heads, value_size), state


def _step(
    slots: Ref,
    what: Ref,
    numbers: Ref,
    q: Ref,
    k: Ref,
    v: Ref,
    *refs: Ref,
    heads_of_key: int,
    by_channel: bool,
) -> None:
    decays, state, out, after = refs if by_channel else (None, *refs)
    row = pl.program_id(1)
    num_heads, key_size, value_size = state.shape[1:]

    def across(columns: jax.Array, head: int) -> jax.Array:
        return jnp.broadcast_to(columns[:, head : head + 1], (key_size, value_size))

    @pl.when(what[row] != SKIP)
    def _():
        begins = what[row] == BEGIN
        keys, queries = _turned(k[0, 0]), _turned(q[0, 0])
        its_decays = None if decays is None else _turned(decays[0, 0])
        pairs = [
            (across(keys, head), across(queries, head)) for head in range(num_heads // heads_of_key)
        ]
        for head in range(num_heads):
            key, query = pairs[head // heads_of_key]
            beta, product = (numbers[0, 0, 0, i * num_heads + head] for i in range(2))
            decay = (
                numbers[0, 0, 0, 2 * num_heads + head]
                if its_decays is None
                else across(its_decays, head)
            )
            # A select also replaces NaN.
            held = decay * jnp.where(begins, 0, state[0, head])
            own = slice(head, head + 1)
            change = beta * (v[0, 0, own] - (held * key).sum(axis=0, keepdims=True))
            out[0, 0, own] = (held * query).sum(axis=0, keepdims=True) + product * change
            after[0, head] = held + key * change

    @pl.when(what[row] == SKIP)
    def _():
        out[...] = jnp.zeros_like(out)

    @pl.when((what[row] == SKIP) & (row == 0))
    def _():
        after[...] = state[...]


def _turned(x: jax.Array) -> jax.Array:
    """[heads, K] to [K, heads or more]."""
    missing = -len(x) % _SUBLANES
    if missing:
        x = jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)])
    return x.T

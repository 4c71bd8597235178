"""The TPU kernel for decodes of Mamba2's state space: each state is read once and written once.

The grid walks over blocks of heads and over the decodes. Rows of a state lie along sublanes, and
what is between b and c along lanes. So inputs are turned from lanes to sublanes, 128 of them at
once, and outputs, which are sums over lanes, are turned back.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.recurrent.tpu_blocks import (
    BEGIN,
    LANES,
    SKIP,
    SUBLANES,
    heads_of_block,
    rows_of_decodes,
)

# A reference to a kernel's operand.
Ref = Any

# Heads that are computed before the first of them is written. The compiler moves no load before a
# store, so that one head would wait for the other one's sums.
_HEADS_AT_ONCE = 16


def run_decodes(
    operands: tuple[jax.Array, ...],
    state: jax.Array,
    rows: StateRows,
    *,
    chip: Chip,
    block_bytes: int | None,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute the decodes; return their outputs, float32 [up to T, N, P], which of other rows are
    anything, and the states, updated in place. `operands` are those of `ssd.xla`."""
    num_slots, num_heads, head_size, state_size = state.shape
    num_rows = min(len(operands[0]), len(rows.slots))
    x, b, c, step, log_decay = (each[:num_rows].astype(jnp.float32) for each in operands)
    heads_of_group = num_heads // b.shape[1]
    heads = heads_of_block(
        num_heads, heads_of_group, 4 * head_size * state_size, chip, block_bytes, cuts=True
    )
    num_blocks = num_heads // heads
    # Inputs of a block, 128 in a row.
    num_inputs = heads * head_size
    x = (step[:, :, None] * x).reshape(num_rows, num_blocks, num_inputs)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -num_inputs % LANES)))
    x = x.reshape(num_rows, num_blocks, -1, LANES)
    decays = jnp.exp(log_decay).reshape(num_rows, num_blocks, 1, heads)
    # Groups of a block; several blocks may have one group.
    num_groups = -(-heads // heads_of_group)
    blocks_of_group = -(-heads_of_group // heads)
    b, c = (each.reshape(num_rows, -1, num_groups, state_size) for each in (b, c))

    def of_row(each: jax.Array, blocks: int = 1, **where: Any) -> pl.BlockSpec:
        shape = (1, 1, *each.shape[2:])
        return pl.BlockSpec(shape, lambda j, i, *_: (i, lax.div(j, blocks), 0, 0), **where)

    of_slot = pl.BlockSpec(
        (1, heads, head_size, state_size), lambda j, i, slots, what: (slots[i], j, 0, 0)
    )
    its = rows_of_decodes(rows, num_rows, num_slots)
    after = jax.ShapeDtypeStruct(state.shape, state.dtype)
    if not interpret:
        # Otherwise XLA moves the states of all slots into VMEM and back, where these are small.
        state = pltpu.with_memory_space_constraint(state, pltpu.HBM)
        after = pltpu.HBM(state.shape, state.dtype)
    num_elements = num_rows * num_heads * head_size * state_size
    out, state = pl.pallas_call(
        functools.partial(_step, heads_of_group=heads_of_group),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_blocks, its.num_rows),
            in_specs=[
                of_row(decays, memory_space=pltpu.SMEM),
                of_row(x),
                of_row(b, blocks_of_group),
                of_row(c, blocks_of_group),
                of_slot,
            ],
            out_specs=[of_row(x), of_slot],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, jnp.float32), after],
        input_output_aliases={6: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=5 * num_elements, transcendentals=0, bytes_accessed=8 * num_elements
        ),
        interpret=interpret,
        name="ssd_decode",
    )(its.slots, its.what, decays, x, b, c, state)
    out = out.reshape(num_rows, num_blocks, -1)[:, :, :num_inputs]
    return out.reshape(num_rows, num_heads, head_size), state


def _step(
    slots: Ref,
    what: Ref,
    decays: Ref,
    x: Ref,
    b: Ref,
    c: Ref,
    state: Ref,
    out: Ref,
    after: Ref,
    *,
    heads_of_group: int,
) -> None:
    row = pl.program_id(1)
    _, num_heads, head_size, state_size = state.shape
    num_columns = x.shape[2]
    heads_of_column = LANES // head_size

    @pl.when(what[row] != SKIP)
    def _():
        begins = what[row] == BEGIN
        inputs = _turned(x[0, 0])  # [128, columns]

        def row_of_group(head: int) -> slice:
            group = head // heads_of_group
            return slice(group, group + 1)

        def advance(head: int) -> jax.Array:
            """The state of a head after the token."""
            place, part = head // heads_of_column, head % heads_of_column
            entering = inputs[part * head_size : (part + 1) * head_size, place : place + 1]
            entering = jnp.broadcast_to(entering, (head_size, state_size))
            # A select also replaces NaN.
            held = decays[0, 0, 0, head] * jnp.where(begins, 0, state[0, head])
            return held + entering * b[0, 0, row_of_group(head)]

        column = lax.broadcasted_iota(jnp.int32, (head_size, LANES), 1)
        # Outputs of the heads of a column, above each other.
        outputs = [jnp.zeros((head_size, LANES), jnp.float32)] * heads_of_column
        for start in range(0, num_heads, _HEADS_AT_ONCE):
            own = range(start, min(start + _HEADS_AT_ONCE, num_heads))
            now = [advance(head) for head in own]
            for head, its in zip(own, now, strict=True):
                after[0, head] = its
            for head, its in zip(own, now, strict=True):
                place, part = head // heads_of_column, head % heads_of_column
                seen = (its * c[0, 0, row_of_group(head)]).sum(axis=1, keepdims=True)
                outputs[part] = jnp.where(column == place, seen, outputs[part])
        out[0, 0] = jnp.concatenate(outputs).T[:num_columns]

    @pl.when(what[row] == SKIP)
    def _():
        out[...] = jnp.zeros_like(out)

    @pl.when((what[row] == SKIP) & (row == 0))
    def _():
        after[...] = state[...]


def _turned(x: jax.Array) -> jax.Array:
    """[columns, 128] to [128, columns or more]."""
    missing = -len(x) % SUBLANES
    if missing:
        x = jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)])
    return x.T

"""The TPU kernel for tiles of Mamba2's state space: `xla` has the formulas.

A tile of all heads is a step of the grid (`recurrent.tpu_tiles`). Heads are computed as pairs: two
heads of 64 fill the lanes of registers, and so do decays between 64 tokens of each of them. What is
between b and c is computed once for a group, and several pairs of it side by side.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.recurrent.rows import TILE, StateRows
from jaxllm_kernels.recurrent.tpu_blocks import LANES
from jaxllm_kernels.recurrent.tpu_tiles import (
    Ref,
    Window,
    bytes_of_states,
    column_of_head,
    cumulate,
    heads_beside,
    numbers_of_heads,
    ones_below,
    product,
    rows_of_head,
    run_tiles,
)

# Rows of states that are computed side by side.
_ROWS_AT_ONCE = 512
# Tokens of two heads lie beside each other in a register.
assert LANES == 2 * TILE


def run_ssd_tiles(
    operands: tuple[jax.Array, ...],
    out: jax.Array,
    state: jax.Array,
    rows: StateRows,
    *,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute the tiles; return the states and the outputs, which are as `_filling_lanes` has
    them. `operands` are those of `ssd.xla`."""
    x, b, c, step, log_decay = operands
    num_tokens, num_heads, head_size = x.shape
    num_groups, state_size = b.shape[1:]
    arrays = [heads_beside(_filling_lanes(each)) for each in (x, b, c)]
    is_narrow = all(each.dtype == jnp.bfloat16 for each in (x, b, c))
    arrays.append(numbers_of_heads(step, log_decay))
    heads_of_group = num_heads // num_groups
    at_once = max(
        n
        for n in range(2, heads_of_group + 1, 2)
        if heads_of_group % n == 0 and (n == 2 or n * head_size <= _ROWS_AT_ONCE)
    )
    of_head = 2 * TILE * TILE * head_size + 4 * TILE * head_size * state_size
    of_group = 2 * TILE * TILE * state_size
    return run_tiles(
        functools.partial(
            _compute,
            num_groups=num_groups,
            at_once=at_once,
            dtype=jnp.bfloat16 if is_narrow else jnp.float32,
        ),
        arrays,
        out,
        state,
        rows,
        scratch=[pltpu.VMEM((LANES, LANES), jnp.float32)] * 2,
        cost=pl.CostEstimate(
            flops=pl.cdiv(num_tokens, TILE) * (num_heads * of_head + num_groups * of_group),
            transcendentals=num_tokens * num_heads * TILE,
            bytes_accessed=4 * (sum(each.size for each in arrays) + x.size)
            + bytes_of_states(state, rows),
        ),
        interpret=interpret,
        name="ssd_tiles",
    )


def _filling_lanes(x: jax.Array) -> jax.Array:
    """[T, heads, numbers] with as many numbers in a row as a register has lanes."""
    return x.reshape(len(x), -1, LANES)


def _compute(
    window: Window,
    operands: Sequence[Ref],
    out: Ref,
    states: Ref,
    scratch: Sequence[Ref],
    *,
    num_groups: int,
    at_once: int,
    dtype: Any,
) -> None:
    """`dtype` has all of x, b and c, which are float32 here."""
    x, b, c, numbers = operands
    decays_by_head, steps_by_head = scratch
    num_heads, head_size, state_size = states.shape
    pairs_of_group, pairs_at_once = num_heads // num_groups // 2, at_once // 2
    pair_size = 2 * head_size

    decays = cumulate(window.load(numbers, 1))
    for by_head, by_token in ((decays_by_head, decays), (steps_by_head, window.load(numbers, 0))):
        # Twice, for either half of a register.
        by_head[...] = jnp.concatenate([by_token] * 2).T

    def load(operand: Ref, index: Any, size: int) -> jax.Array:
        """[TILE, size], of which the operand has several rows if they are wider than registers."""
        num_rows = size // LANES
        parts = [window.load(operand, index * num_rows + i) for i in range(num_rows)]
        return jnp.concatenate(parts, axis=1)

    def load_pair(pair: Any) -> _Pair:
        heads = [2 * pair, 2 * pair + 1]
        decays_beside, steps_beside = (
            _beside([by_head[pl.ds(head, 1), :] for head in heads], TILE)
            for by_head in (decays_by_head, steps_by_head)
        )
        columns = [column_of_head(decays, head) for head in heads]
        return _Pair(load(x, pair, pair_size), columns, decays_beside, steps_beside)

    def run_group(group: jax.Array, _: None) -> None:
        into, out_of = (load(each, group, state_size).astype(dtype) for each in (b, c))
        scores = product(out_of, jnp.concatenate([into] * 2), turned=True)
        scores = scores * jnp.concatenate([ones_below(0)] * 2, axis=1)

        def run_pairs(i: jax.Array, _: None) -> None:
            first = group * pairs_of_group + i * pairs_at_once
            pairs = [load_pair(first + j) for j in range(pairs_at_once)]
            own = pl.ds(2 * first, at_once)
            held = states[own].reshape(-1, state_size)
            after, outputs = _compute_pairs(pairs, scores, into, out_of, held)
            states[own] = after.reshape(at_once, head_size, state_size)
            num_rows = pair_size // LANES
            for j, output in enumerate(outputs):
                for k in range(num_rows):
                    row = rows_of_head(out, (first + j) * num_rows + k)
                    out[row, :] = output[:, k * LANES : (k + 1) * LANES]

        lax.fori_loop(0, pairs_of_group // pairs_at_once, run_pairs, None)

    lax.fori_loop(0, num_groups, run_group, None)


class _Pair(NamedTuple):
    """What a tile has of two heads of a group."""

    x: jax.Array  # [TILE, 2 P]
    # Cumulated log decays of each of the heads, and of both beside each other.
    decays: Sequence[jax.Array]  # [TILE, 1]
    decays_beside: jax.Array  # [1, 2 TILE]
    steps_beside: jax.Array  # [1, 2 TILE]


def _compute_pairs(
    pairs: Sequence[_Pair],
    scores: jax.Array,
    into: jax.Array,
    out_of: jax.Array,
    held: jax.Array,
) -> tuple[jax.Array, list[jax.Array]]:
    """The states [heads * P, K] after a tile, and the outputs [TILE, 2 P] of the pairs. Each step
    is written for all pairs before the next.

    Args:
      scores: [TILE, 2 TILE], products of the group's c and b, twice; zeros for later tokens.
      into, out_of: b and c [TILE, K], in bfloat16 if this has all of x, too.
      held: the states before the tile.
    """
    pair_size = pairs[0].x.shape[1]
    head_size = pair_size // 2
    seen = product(out_of, held, turned=True)  # [TILE, heads * P]
    # Steps and decays multiply what is between tokens, whose products have x as it is.
    between = [
        scores * jnp.exp(jnp.minimum(_beside(x.decays, TILE) - x.decays_beside, 0)) for x in pairs
    ]
    outputs = [
        product(each * x.steps_beside, _diagonal(x.x).astype(into.dtype))
        for x, each in zip(pairs, between, strict=True)
    ]
    outputs = [
        output
        + jnp.exp(_beside(x.decays, head_size)) * seen[:, i * pair_size : (i + 1) * pair_size]
        for i, (x, output) in enumerate(zip(pairs, outputs, strict=True))
    ]
    last = [[decays[TILE - 1 :] for decays in x.decays] for x in pairs]
    kept = [
        jnp.exp(_beside(ends, TILE) - x.decays_beside) * x.steps_beside
        for x, ends in zip(pairs, last, strict=True)
    ]
    kept = [
        x.x.T * _above([each[:, :TILE], each[:, TILE:]], (head_size, TILE))
        for x, each in zip(pairs, kept, strict=True)
    ]
    added = product(jnp.concatenate(kept), into)
    decays = [_above([jnp.exp(end) for end in ends], (head_size, held.shape[1])) for ends in last]
    return jnp.concatenate(decays) * held + added, outputs


def _beside(heads: Sequence[jax.Array], width: int) -> jax.Array:
    """Columns [rows, 1] of two heads, `width` times each; or halves of [rows, 2 width]."""
    left, right = heads
    lanes = lax.broadcasted_iota(jnp.int32, (len(left), 2 * width), 1)
    return jnp.where(lanes < width, left, right)


def _above(heads: Sequence[jax.Array], shape: tuple[int, int]) -> jax.Array:
    """Arrays of two heads above each other, each of them in a shape."""
    return jnp.concatenate([jnp.broadcast_to(x, shape) for x in heads])


def _diagonal(x: jax.Array) -> jax.Array:
    """The left and the right half of x [TILE, 2 P] on a diagonal: [2 TILE, 2 P]."""
    lanes = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    left = lanes < x.shape[1] // 2
    return jnp.concatenate([jnp.where(left, x, 0.0), jnp.where(left, 0.0, x)])

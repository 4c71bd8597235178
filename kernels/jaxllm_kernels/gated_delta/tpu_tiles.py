"""The TPU kernel for tiles of the gated delta rule: `xla` has the formulas.

A tile of all heads is a step of the grid (`recurrent.tpu_tiles`). Heads are computed several at
once: the products of a head wait for each other, and those of other heads fill the time.
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
from jaxllm_kernels.recurrent.tpu_blocks import LANES, SUBLANES
from jaxllm_kernels.recurrent.tpu_tiles import (
    Ref,
    Window,
    bytes_of_states,
    column_of_head,
    cumulate,
    heads_beside,
    numbers_of_heads,
    ones_below,
    places,
    product,
    rows_of_head,
    run_tiles,
)

# Heads whose products are computed side by side.
_HEADS_AT_ONCE = 4
# Tokens of a block, within which changes are substituted, and decayed products computed pair by
# pair.
_BLOCK = 16


def run_delta_tiles(
    operands: tuple[jax.Array, ...],
    out: jax.Array,
    state: jax.Array,
    rows: StateRows,
    *,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Compute the tiles; return the states and the outputs. `operands` are those of
    `api.DeltaOp`."""
    q, k, v, log_decay, beta = operands
    num_heads, num_key_heads = v.shape[1], q.shape[1]
    by_channel = log_decay.ndim == 3
    arrays = [heads_beside(x) for x in (q, k, v)]
    # The first row has betas, all others decays.
    arrays.append(numbers_of_heads(beta, beta if by_channel else log_decay))
    if by_channel:
        arrays.append(heads_beside(log_decay))
    together = num_heads // num_key_heads
    key_heads = max(
        n
        for n in range(1, num_key_heads + 1)
        if num_key_heads % n == 0 and (n == 1 or n * together <= _HEADS_AT_ONCE)
    )
    square = 2 * TILE * TILE
    key_size, value_size = state.shape[2:]
    of_head = 10 * square * TILE + square * (2 * value_size + 2 * key_size)
    of_head += 6 * TILE * key_size * value_size
    compute = functools.partial(
        _compute,
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_heads=key_heads,
        by_channel=by_channel,
    )
    return run_tiles(
        compute,
        arrays,
        out,
        state,
        rows,
        scratch=[pltpu.VMEM((TILE, LANES), jnp.float32), pltpu.VMEM((LANES, TILE), jnp.float32)],
        cost=pl.CostEstimate(
            flops=pl.cdiv(len(v), TILE) * num_heads * of_head,
            transcendentals=len(v) * num_heads * TILE,
            bytes_accessed=4 * (sum(x.size for x in arrays) + v.size)
            + bytes_of_states(state, rows),
        ),
        interpret=interpret,
        name="delta_tiles",
    )


def _compute(
    window: Window,
    operands: Sequence[Ref],
    out: Ref,
    states: Ref,
    scratch: Sequence[Ref],
    *,
    num_heads: int,
    num_key_heads: int,
    key_heads: int,
    by_channel: bool,
) -> None:
    q, k, v, numbers, *decays = operands
    together = num_heads // num_key_heads
    by_token, by_head = scratch

    betas = window.load(numbers, 0)
    if not by_channel:
        summed = cumulate(window.load(numbers, 1))
        by_token[...], by_head[...] = summed, summed.T

    def run_heads(i: jax.Array, _: None) -> None:
        heads = []
        for key_head in (i * key_heads + own for own in range(key_heads)):
            key, query = window.load(k, key_head), window.load(q, key_head)
            products = None
            if not by_channel:
                products = product(jnp.concatenate([key, query]), key, turned=True)
            for head in (key_head * together + j for j in range(together)):
                if products is None:
                    summed = cumulate(window.load(decays[0], head))
                    scores = _decayed_products(key, query, summed)
                else:
                    summed = column_of_head(by_token[...], head)
                    between = jnp.exp(jnp.minimum(summed - by_head[pl.ds(head, 1), :], 0))
                    scores = products[:TILE] * between, products[TILE:] * between
                beta, value = column_of_head(betas, head), window.load(v, head)
                heads.append(_Head(key, query, value, beta, summed, *scores, states[head]))
        for j, (state, outputs) in enumerate(_compute_heads(heads)):
            head = i * (key_heads * together) + j
            states[head] = state
            out[rows_of_head(out, head), :] = outputs

    lax.fori_loop(0, num_key_heads // key_heads, run_heads, None)


class _Head(NamedTuple):
    """What a tile has of a head."""

    key: jax.Array  # [TILE, K]
    query: jax.Array  # [TILE, K]
    value: jax.Array  # [TILE, V]
    beta: jax.Array  # [TILE, 1]
    summed: jax.Array  # [TILE, 1 or K]: cumulated log decays
    # Decayed products with keys, [TILE, TILE]; those with later tokens are anything.
    keys: jax.Array
    queries: jax.Array
    state: jax.Array  # [K, V]


def _compute_heads(heads: Sequence[_Head]) -> list[tuple[jax.Array, jax.Array]]:
    """The states after a tile, and outputs. Each step is written for all heads before the next."""
    since_start = [jnp.exp(x.summed) for x in heads]
    seen = [
        product(jnp.concatenate([since * x.key, since * x.query]), x.state)
        for x, since in zip(heads, since_start, strict=True)
    ]
    inverses = _invert([x.beta * (x.keys * ones_below(1)) for x in heads])
    changes = [
        product(inverse, x.beta * (x.value - held[:TILE]))
        for x, inverse, held in zip(heads, inverses, seen, strict=True)
    ]
    outputs = [
        held[TILE:] + product(x.queries * ones_below(0), change)
        for x, held, change in zip(heads, seen, changes, strict=True)
    ]
    kept = [(jnp.exp(x.summed[TILE - 1 :] - x.summed) * x.key).T for x in heads]
    added = [product(x, change) for x, change in zip(kept, changes, strict=True)]
    return [
        (_across(since[TILE - 1 :]) * x.state + more, y)
        for x, since, more, y in zip(heads, since_start, added, outputs, strict=True)
    ]


def _across(decay: jax.Array) -> jax.Array:
    """The decays of a state's rows, [1 or K, 1] of [1, 1 or K]."""
    if decay.shape[1] == 1:
        return decay
    return jnp.broadcast_to(decay, (SUBLANES, decay.shape[1])).T[:, :1]


def _invert(lower: Sequence[jax.Array]) -> list[jax.Array]:
    """The inverses of 1 + lower: blocks on the diagonal by substitution, then by blocks that double
    (`xla._invert`)."""
    row, column = places()
    in_block = (row & -_BLOCK) == (column & -_BLOCK)
    inverses = [(row == column).astype(jnp.float32) for _ in lower]
    for j in range(_BLOCK - 1):
        is_own = in_block & ((column & (_BLOCK - 1)) == j)
        factors = [jnp.where(is_own, x, 0.0).sum(axis=1, keepdims=True) for x in lower]
        inverses = [
            x - factor * _rows_of_blocks(x, j) for x, factor in zip(inverses, factors, strict=True)
        ]
    size = _BLOCK
    while size < TILE:
        below = ((row & -2 * size) == (column & -2 * size)) & ((row & size) > (column & size))
        between = [
            product(inverse, jnp.where(below, x, 0.0))
            for inverse, x in zip(inverses, lower, strict=True)
        ]
        between = [product(x, inverse) for x, inverse in zip(between, inverses, strict=True)]
        inverses = [x - y for x, y in zip(inverses, between, strict=True)]
        size *= 2
    return inverses


def _rows_of_blocks(x: jax.Array, j: int) -> jax.Array:
    """Row j of each block, in all rows of the block."""
    rows = [x[first + j : first + j + 1] for first in range(0, TILE, _BLOCK)]
    return jnp.concatenate([jnp.broadcast_to(row, (_BLOCK, x.shape[1])) for row in rows], axis=0)


def _decayed_products(
    key: jax.Array, query: jax.Array, summed: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What `xla._decayed_products` computes, of keys and of queries with keys."""
    row, column = places()
    within = [jnp.zeros((TILE, TILE), jnp.float32) for _ in range(2)]
    same_block = (row & -_BLOCK) == (column & -_BLOCK)
    for j in range(_BLOCK):
        decayed = _rows_of_blocks(key, j) * jnp.exp(
            jnp.minimum(summed - _rows_of_blocks(summed, j), 0)
        )
        is_own = same_block & ((column & (_BLOCK - 1)) == j)
        for which, x in enumerate((key, query)):
            products = (x * decayed).sum(axis=1, keepdims=True)
            within[which] = jnp.where(is_own, products, within[which])
    before = [[jnp.zeros((_BLOCK, TILE), jnp.float32)] for _ in range(2)]
    tokens = lax.broadcasted_iota(jnp.int32, key.shape, 0)
    for first in range(_BLOCK, TILE, _BLOCK):
        origin, own = summed[first - 1 : first], slice(first, first + _BLOCK)
        down = jnp.exp(summed[own] - origin)
        other = jnp.where(tokens < first, key * jnp.exp(jnp.minimum(origin - summed, 0)), 0.0)
        both = jnp.concatenate([key[own] * down, query[own] * down], axis=0)
        both = product(both, other, turned=True)
        before[0].append(both[:_BLOCK])
        before[1].append(both[_BLOCK:])
    keys, queries = (x + jnp.concatenate(y, axis=0) for x, y in zip(within, before, strict=True))
    return keys, queries

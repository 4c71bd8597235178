"""The gated delta rule in plain XLA, for every platform.

A decode is the formula. A tile of tokens i, with the cumulated log decays G and the state S before
the tile, is computed at once. The changes u that its tokens make solve a triangular system:

    u_i = beta_i (v_i - S^T (e^G_i k_i) - sum over j < i of (k_i . k_j e^(G_i - G_j)) u_j)
    out_i = S^T (e^G_i q_i) + sum over j <= i of (q_i . k_j e^(G_i - G_j)) u_j
    S <- e^G_last S + sum over j of (e^(G_last - G_j) k_j) u_j^T

The matrix of the system is inverted without the state, as is all that does not contain S.

No exponent is above zero, whatever the decays are. The matrix is inverted by blocks, and not by
powers: of keys that repeat, these have no correct digits.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.rows import TILE, StateRows
from jaxllm_kernels.recurrent.scan import AtOnce, Chunk, Decodes, Tiles, scan_rows

# Tokens of a block of the triangular system. Blocks on the diagonal are inverted as a whole.
_BLOCK = 16


@dataclass(frozen=True)
class XlaDelta:
    """`api.DeltaOp` on every platform."""

    name: str = "xla"
    at_once: AtOnce = AtOnce()

    def tuned_for(self, chip: Chip) -> "XlaDelta":
        """Return the op with its tunables chosen for a chip."""
        return dataclasses.replace(self, at_once=AtOnce.on(chip))

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array,
        state: jax.Array,
        rows: StateRows,
        *,
        decodes: Decodes | None = None,
        tiles: Tiles | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """`decodes` and `tiles` compute these in place of XLA."""
        return scan_rows(
            _step,
            CHUNK,
            (q, k, v, log_decay, beta),
            state,
            rows,
            out_shape=v.shape[1:],
            at_once=self.at_once,
            decodes=decodes,
            tiles=tiles,
        )


def _step(state: jax.Array, operands: Any) -> tuple[jax.Array, jax.Array]:
    """One token: q and k [M, K], v [N, V], the state [N, K, V]."""
    q, k, v, log_decay, beta = operands
    q, k = (_repeated(x, len(v), axis=0) for x in (q, k))
    state = jnp.exp(log_decay.reshape(len(v), -1, 1)) * state
    # Of the state as it is now, so that it is read once for both.
    held, seen = ((state * x[:, :, None]).sum(axis=1) for x in (k, q))
    change = beta[:, None] * (v.astype(jnp.float32) - held)
    out = seen + (q * k).sum(axis=1, keepdims=True) * change
    return state + k[:, :, None] * change[:, None, :], out


def _prepare(operands: Any) -> Any:
    """What a tile computes without its state, of q and k [C, M, K] and v [C, N, V]."""
    q, k, v, log_decay, beta = operands
    num_heads = v.shape[1]
    q, k, v = (x.astype(jnp.float32).swapaxes(0, 1) for x in (q, k, v))  # [heads, C, ...]
    decays = jnp.cumsum(log_decay.swapaxes(0, 1), axis=1)  # [N, C] or [N, C, K]
    beta = beta.T[:, :, None]
    if decays.ndim == 2:
        decayed = jnp.exp(jnp.minimum(decays[:, :, None] - decays[:, None, :], 0))
        keys, queries = (
            _repeated(_product(x, k.swapaxes(1, 2)), num_heads, axis=0) * decayed for x in (k, q)
        )
        decays = decays[:, :, None]
        q, k = (_repeated(x, num_heads, axis=0) for x in (q, k))
    else:
        q, k = (_repeated(x, num_heads, axis=0) for x in (q, k))
        keys, queries = (_decayed_products(x, k, decays) for x in (k, q))
    since_start, until_end = jnp.exp(decays), jnp.exp(decays[:, -1:] - decays)
    return (
        jnp.concatenate([since_start * k, since_start * q], axis=1),  # [N, 2 C, K]
        v,
        # This matrix makes the changes out of how far values are from what the state has for keys.
        _invert(beta * jnp.tril(keys, -1)) * beta.swapaxes(1, 2),
        jnp.tril(queries),
        until_end * k,
        since_start[:, -1, :, None],
    )


def _advance(state: jax.Array, prepared: Any) -> tuple[jax.Array, jax.Array]:
    """Compute what is left of a tile, with the state [N, K, V] before it."""
    reading, values, solution, queries, keys, decay = prepared
    seen = _product(reading, state)
    changes = _product(solution, values - seen[:, :TILE])
    out = seen[:, TILE:] + _product(queries, changes)
    return decay * state + _product(keys.swapaxes(1, 2), changes), out.swapaxes(0, 1)


CHUNK = Chunk(_prepare, _advance)


def _decayed_products(a: jax.Array, b: jax.Array, decays: jax.Array) -> jax.Array:
    """The sums over d of a_i,d b_j,d e^(G_i,d - G_j,d), for j <= i: [N, C, C] of [N, C, K].

    They are products of two matrices only if one of them has exponents above zero. So each block of
    tokens i has an origin between it and the tokens before it, from which both go down; the pairs
    within a block are computed one by one.
    """
    rows = []
    for first in range(0, TILE, _BLOCK):
        own = slice(first, first + _BLOCK)
        within = jnp.exp(jnp.minimum(decays[:, own, None] - decays[:, None, own], 0))
        within = (a[:, own, None] * b[:, None, own] * within).sum(axis=-1)
        blocks = [within, jnp.zeros((len(a), _BLOCK, TILE - first - _BLOCK))]
        if first:
            origin = decays[:, first - 1 : first]
            before = _product(
                a[:, own] * jnp.exp(decays[:, own] - origin),
                (b[:, :first] * jnp.exp(origin - decays[:, :first])).swapaxes(1, 2),
            )
            blocks.insert(0, before)
        rows.append(jnp.concatenate(blocks, axis=-1))
    return jnp.concatenate(rows, axis=1)


def _invert(lower: jax.Array) -> jax.Array:
    """The inverses of 1 + lower for strictly lower triangular matrices [N, C, C].

    A matrix of two blocks on the diagonal and a block L below the first one has an inverse of the
    same form: with the blocks' own inverses A and B on its diagonal, and -B L A below A. So blocks
    double.
    """
    blocks = [slice(first, first + _BLOCK) for first in range(0, TILE, _BLOCK)]
    inverse, size = _invert_blocks(jnp.stack([lower[:, own, own] for own in blocks], 1)), _BLOCK
    while size < TILE:
        firsts, seconds = inverse[:, ::2], inverse[:, 1::2]
        below = jnp.stack(
            [
                lower[:, at + size : at + 2 * size, at : at + size]
                for at in range(0, TILE, 2 * size)
            ],
            axis=1,
        )
        below = -_product(_product(seconds, below), firsts)
        rows = [firsts, jnp.zeros_like(below)], [below, seconds]
        inverse = jnp.concatenate([jnp.concatenate(row, axis=-1) for row in rows], axis=-2)
        size *= 2
    return inverse[:, 0]


def _invert_blocks(lower: jax.Array) -> jax.Array:
    """Invert [..., B, B] likewise, from single rows on, by products of whole matrices."""
    places = jnp.arange(_BLOCK)
    inverse, size = jnp.broadcast_to(jnp.eye(_BLOCK), lower.shape), 1
    while size < _BLOCK:
        pairs = places // (2 * size)
        below = (pairs[:, None] == pairs) & (places[:, None] // size > places // size)
        between = jnp.where(below, lower, 0)
        if size > 1:
            between = _product(_product(inverse, between), inverse)
        inverse, size = inverse - between, 2 * size
    return inverse


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


def _repeated(x: jax.Array, num_heads: int, *, axis: int) -> jax.Array:
    """Heads of queries or keys, in float32, one for each head of values."""
    return jnp.repeat(x.astype(jnp.float32), num_heads // x.shape[axis], axis=axis)

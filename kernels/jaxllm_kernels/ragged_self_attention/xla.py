"""Ragged self-attention on XLA, for every platform.

The flat batch is cut into tiles of queries. The rows of a tile lie side by side, so the keys that
it sees are one stretch of the batch: an inner loop goes over blocks of that stretch, and its length
is that of the rows. So short rows cost little, however many there are, and no memory grows with the
square of a length. One tile is computed after the other.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxllm_kernels.common import cdiv
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig

# Less than any score, and finite, so that the difference of two of them is a number.
_NEVER = -1e30


@dataclass(frozen=True)
class XlaSelfAttention:
    """`api.SelfAttentionOp`; tiles have `tile` queries, and blocks as many keys."""

    tile: int = 64
    name: str = "xla"

    def tuned_for(self, chip: Chip) -> "XlaSelfAttention":
        """On accelerators an iteration costs more than what a larger tile computes in vain."""
        return replace(self, tile=64 if chip.platform == "cpu" else 256)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        query_starts: jax.Array,
        config: SelfAttentionConfig,
        query_ends: jax.Array | None = None,
    ) -> jax.Array:
        num_tokens, num_heads, size = q.shape
        num_kv_heads, value_size = v.shape[1:]
        tile = min(self.tile, num_tokens)
        num_tiles = cdiv(num_tokens, tile)
        padded = num_tiles * tile
        q, k, v = (jnp.pad(x, ((0, padded - num_tokens), (0, 0), (0, 0))) for x in (q, k, v))
        first, end = seen_places(query_starts, query_ends, padded, config)
        # Heads first, so that each head's products are of matrices: [K, G, T, H] and [K, T, H].
        q = q.reshape(padded, num_kv_heads, -1, size).transpose(1, 2, 0, 3)
        k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)

        def one_tile(index: jax.Array) -> jax.Array:
            start = index * tile
            queries = jax.lax.dynamic_slice_in_dim(q, start, tile, axis=2)
            firsts = jax.lax.dynamic_slice_in_dim(first, start, tile)
            ends = jax.lax.dynamic_slice_in_dim(end, start, tile)
            low, high = firsts.min(), ends.max()

            def one_block(block: jax.Array, held: tuple) -> tuple:
                wanted = low + block * tile
                begin = jnp.minimum(wanted, padded - tile)  # the last block may not move on
                keys = jax.lax.dynamic_slice_in_dim(k, begin, tile, axis=1)
                values = jax.lax.dynamic_slice_in_dim(v, begin, tile, axis=1)
                places = begin + jnp.arange(tile)
                sees = (places >= firsts[:, None]) & (places < ends[:, None]) & (places >= wanted)
                return _add(held, queries, keys, values, sees, config.scale)

            shape = queries.shape[:3]
            nothing = (
                jnp.full(shape, _NEVER, jnp.float32),
                jnp.zeros(shape, jnp.float32),
                jnp.zeros((*shape, value_size), jnp.float32),
            )
            num_blocks = (high - low + tile - 1) // tile
            _, total, out = jax.lax.fori_loop(0, num_blocks, one_block, nothing)
            return (out / total[..., None]).astype(q.dtype)

        out = jax.lax.map(one_tile, jnp.arange(num_tiles, dtype=jnp.int32))
        # [tiles, K, G, tile, V] -> [T, N, V]
        return out.transpose(0, 3, 1, 2, 4).reshape(padded, num_heads, value_size)[:num_tokens]


def seen_places(
    query_starts: jax.Array,
    query_ends: jax.Array | None,
    num_tokens: int,
    config: SelfAttentionConfig,
) -> tuple[jax.Array, jax.Array]:
    """The first place that each token sees, and the place behind the last; padding sees itself."""
    places = jnp.arange(num_tokens, dtype=jnp.int32)
    is_real, rows = locate_places(query_starts, query_ends, num_tokens)
    ends = query_starts[1:] if query_ends is None else query_ends
    first = jnp.where(is_real, query_starts[rows], places)
    end = jnp.where(is_real, ends[rows], places + 1)
    if (reach := config.reach) is not None:
        first, end = jnp.maximum(first, places - reach), jnp.minimum(end, places + reach + 1)
    if config.causal:
        end = jnp.minimum(end, places + 1)
    return first, end


def locate_places(
    query_starts: jax.Array, query_ends: jax.Array | None, num_tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Whether each place is one of a row, and of which; the row of padding is in range."""
    places = jnp.arange(num_tokens, dtype=jnp.int32)
    ends = query_starts[1:] if query_ends is None else query_ends
    rows = jnp.searchsorted(ends, places, side="right", method="compare_all")
    rows = jnp.minimum(rows, len(ends) - 1)
    return (places >= query_starts[rows]) & (places < ends[rows]), rows


def _add(
    held: tuple[jax.Array, jax.Array, jax.Array],
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    sees: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Add a block of keys to a tile's highest scores, sums of weights and sums of values."""
    highest, total, out = held
    scores = scale * jnp.einsum("kgqh,kch->kgqc", queries, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(sees, scores, _NEVER)
    now = jnp.maximum(highest, scores.max(-1))
    weights = jnp.where(sees, jnp.exp(scores - now[..., None]), 0.0)
    keeps = jnp.exp(highest - now)
    added = jnp.einsum(
        "kgqc,kch->kgqh", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    return now, total * keeps + weights.sum(-1), out * keeps[..., None] + added

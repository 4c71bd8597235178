"""The paged cache of the reference and XLA backends: its layout, and how a step writes to it.

A layer's cache is one array [blocks, 2 (keys, values), K, block_size, H]. Heads come before tokens,
so that scores and outputs are matrix products over contiguous [tokens, H] panels. XLA:CPU computes
these four times faster than with tokens first. If values have another size than keys, they follow
the key of their token: [blocks, 1, K, block_size, H + V].
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.common import storage_dtype, to_storage
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    KVScales,
    RaggedBatch,
    TokenPlaces,
)

# The axis of kv heads in a layer's cache.
HEAD_AXIS = 2

# An index past the end of every array, which a scatter drops.
OUT_OF_RANGE = jnp.iinfo(jnp.int32).max


def pages_shape(
    config: AttentionConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one layer's cache."""
    keys, values = config.head_size, config.value_size
    panels, width = (2, keys) if keys == values else (1, keys + values)
    return jax.ShapeDtypeStruct(
        (num_blocks, panels, config.num_kv_heads, block_size, width),
        storage_dtype(config.kv_dtype or dtype),
    )


def keys_and_values(pages: jax.Array, head_size: int) -> tuple[jax.Array, jax.Array]:
    """The keys [K, tokens, H] and values [K, tokens, V] of pages [1 or 2, K, tokens, width]."""
    if len(pages) == 2:
        return pages[0], pages[1]
    return pages[0, ..., :head_size], pages[0, ..., head_size:]


def write_blocks(batch: RaggedBatch, places: TokenPlaces) -> jax.Array:
    """The block to which each token is written, [T]; out of range for padding."""
    blocks = batch.block_tables[places.rows, jnp.maximum(places.positions, 0) // batch.block_size]
    return jnp.where(places.positions < 0, OUT_OF_RANGE, blocks)


def write_pages(
    cache: jax.Array, k: jax.Array, v: jax.Array, blocks: jax.Array, positions: jax.Array
) -> jax.Array:
    """Write keys [T, K, H] and values [T, K, V], in the cached dtype, to these places."""
    assert cache.dtype == storage_dtype(k.dtype), (cache.dtype, k.dtype)
    block_size = cache.shape[3]
    if k.shape == v.shape:
        kv = jnp.stack([k, v], axis=1)
    else:
        kv = jnp.concatenate([k, v], axis=-1)[:, None]
    kv = to_storage(kv)
    return cache.at[blocks, :, :, positions % block_size].set(kv, mode="drop")


def to_cached(
    k: jax.Array, v: jax.Array, config: AttentionConfig, scales: KVScales | None
) -> tuple[jax.Array, jax.Array]:
    """Convert keys [T, K, H] and values [T, K, V] to the dtype of the cache."""
    if config.kv_dtype is None:
        return k, v
    assert scales is not None, config
    return quantize(k, scales.k, config.kv_dtype), quantize(v, scales.v, config.kv_dtype)


def quantize(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Divide x [T, K, H] by the scale [K] of its head; round to an 8-bit dtype.

    Values beyond the dtype's range are clipped.
    """
    x = x.astype(jnp.float32) / scale[:, None]
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(x), -127, 127).astype(dtype)
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)

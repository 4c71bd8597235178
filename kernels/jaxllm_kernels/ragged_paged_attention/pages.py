"""The paged cache of the reference and XLA backends: its layout, and how a step writes to it.

A layer's cache is one array [blocks, 2 (keys, values), K, block_size, H]. Heads come before tokens,
so that scores and outputs are matrix products over contiguous [tokens, H] panels. XLA:CPU computes
these four times faster than with tokens first.
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
    return jax.ShapeDtypeStruct(
        (num_blocks, 2, config.num_kv_heads, block_size, config.head_size),
        storage_dtype(config.kv_dtype or dtype),
    )


def write_blocks(batch: RaggedBatch, places: TokenPlaces) -> jax.Array:
    """The block to which each token is written, [T]; out of range for padding."""
    blocks = batch.block_tables[places.rows, jnp.maximum(places.positions, 0) // batch.block_size]
    return jnp.where(places.positions < 0, OUT_OF_RANGE, blocks)


def write_pages(
    cache: jax.Array, k: jax.Array, v: jax.Array, blocks: jax.Array, positions: jax.Array
) -> jax.Array:
    """Write keys and values, both [T, K, H] in the cached dtype, to these blocks and positions."""
    assert cache.dtype == storage_dtype(k.dtype), (cache.dtype, k.dtype)
    block_size = cache.shape[3]
    kv = to_storage(jnp.stack([k, v], axis=1))
    return cache.at[blocks, :, :, positions % block_size].set(kv, mode="drop")


def to_cached(
    k: jax.Array, v: jax.Array, config: AttentionConfig, scales: KVScales | None
) -> tuple[jax.Array, jax.Array]:
    """Convert keys and values, both [T, K, H], to the dtype of the cache."""
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

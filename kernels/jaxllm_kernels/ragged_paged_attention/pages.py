"""The paged cache of the reference and XLA backends: its layout and how a step writes to it.

A layer's cache is one array [blocks, 2 (keys, values), K, block_size, H]. Heads come before tokens:
scores and outputs are then matrix products over contiguous [tokens, H] panels, which XLA:CPU
computes four times faster than with tokens first.
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

# Of kv heads in a layer's cache.
HEAD_AXIS = 2

# An index past the end of every array: a scatter drops it.
OUT_OF_RANGE = jnp.iinfo(jnp.int32).max


def pages_shape(
    config: AttentionConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
) -> jax.ShapeDtypeStruct:
    """Shape and type of one layer's cache."""
    return jax.ShapeDtypeStruct(
        (num_blocks, 2, config.num_kv_heads, block_size, config.head_size),
        storage_dtype(config.kv_dtype or dtype),
    )


def write_blocks(batch: RaggedBatch, places: TokenPlaces) -> jax.Array:
    """The block that each token is written to, [T]; out of range for padding."""
    blocks = batch.block_tables[places.rows, jnp.maximum(places.positions, 0) // batch.block_size]
    return jnp.where(places.positions < 0, OUT_OF_RANGE, blocks)


def write_pages(
    cache: jax.Array, k: jax.Array, v: jax.Array, blocks: jax.Array, positions: jax.Array
) -> jax.Array:
    """Write keys and values, both [T, K, H] and as cached, of tokens with these places."""
    assert cache.dtype == storage_dtype(k.dtype), (cache.dtype, k.dtype)
    block_size = cache.shape[3]
    kv = to_storage(jnp.stack([k, v], axis=1))
    return cache.at[blocks, :, :, positions % block_size].set(kv, mode="drop")


def to_cached(
    k: jax.Array, v: jax.Array, config: AttentionConfig, scales: KVScales | None
) -> tuple[jax.Array, jax.Array]:
    """Keys and values, both [T, K, H], in the type in which the cache keeps them."""
    if config.kv_dtype is None:
        return k, v
    assert scales is not None, config
    return quantize(k, scales.k, config.kv_dtype), quantize(v, scales.v, config.kv_dtype)


def quantize(x: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x [T, K, H] over the scale [K] of its head, as the nearest value of an 8-bit type.

    What lies beyond the type's range becomes the end of it.
    """
    x = x.astype(jnp.float32) / scale[:, None]
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.clip(jnp.round(x), -127, 127).astype(dtype)
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)

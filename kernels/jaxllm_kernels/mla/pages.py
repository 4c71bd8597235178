"""The paged cache of the reference and XLA backends: [blocks, block_size, width].

`width` is the size of a row rounded up to whole registers of 128 lanes of a TPU: 576 to 640. With
another width XLA would give the cache another layout in a program for a TPU, and copy it.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.common import round_up, storage_dtype, to_storage
from jaxllm_kernels.mla.api import LatentConfig

_LANES = 128


def row_width(config: LatentConfig) -> int:
    """The size of a row in the cache."""
    return round_up(config.head_size, _LANES)


def pages_shape(
    config: LatentConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one layer's cache."""
    shape = (num_blocks, block_size, row_width(config))
    return jax.ShapeDtypeStruct(shape, storage_dtype(dtype))


def write_rows(
    cache: jax.Array, rows: jax.Array, blocks: jax.Array, positions: jax.Array
) -> jax.Array:
    """Write rows [T, W] to these blocks, at these positions of their contexts."""
    assert cache.dtype == storage_dtype(rows.dtype), (cache.dtype, rows.dtype)
    padded = jnp.pad(rows, ((0, 0), (0, cache.shape[-1] - rows.shape[-1])))
    places = positions % cache.shape[1]
    return cache.at[blocks, places].set(to_storage(padded), mode="drop")

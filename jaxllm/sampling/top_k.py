"""The k largest logits of each row: exactly `jax.lax.top_k`, computed by narrow ones.

For a TPU, XLA needs 7 to 10 CPU seconds to compile a `top_k` over a vocabulary: a third of a whole
step's compilation. A `top_k` over at most the lanes of a vector register compiles in less than half
a second. So the maxima of blocks first exclude columns that cannot be among the k. All choices
prefer the first of equals, as `top_k` does. On CPU a narrow `top_k` is always one call
(`Layout.max_top_k_columns`), because there only the number of calls and columns matters.
"""

import jax
import jax.numpy as jnp
from jaxllm_kernels.common import cdiv

_BLOCK = 64
_LARGEST_K = 32  # for a larger k, blocks would exclude few columns


def top_k(x: jax.Array, k: int, max_columns: int) -> tuple[jax.Array, jax.Array]:
    """The k largest values of each row of f32 [n, V], best first, and their columns, i32. An XLA
    `top_k` gets at most `max_columns`, unless k is large."""
    rows, width = x.shape
    if k > _LARGEST_K or cdiv(width, _BLOCK) <= max(k, 1):
        values, columns = jax.lax.top_k(x, k)
        return values, columns
    blocks = _cut(x, _BLOCK)
    # The k largest are in the k blocks with the largest maxima. Sorted blocks keep the columns in
    # order, so that ties go to the first.
    _, chosen = _in_parts(jnp.max(blocks, axis=2), k, max_columns)
    chosen = jnp.sort(chosen, axis=1)
    found = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1)
    values, places = _in_parts(found, k, max_columns)
    block = jnp.take_along_axis(chosen, places // _BLOCK, axis=1)
    return values, block * _BLOCK + places % _BLOCK


def _in_parts(x: jax.Array, k: int, max_columns: int) -> tuple[jax.Array, jax.Array]:
    """Reduce each part of a row to its k largest, repeatedly until one part is left."""
    rows, width = x.shape
    if width <= max_columns:
        values, columns = jax.lax.top_k(x, k)
        return values, columns
    parts = _cut(x, max_columns)
    values, places = jax.lax.top_k(parts, k)
    columns = places + max_columns * jnp.arange(parts.shape[1], dtype=jnp.int32)[:, None]
    values, places = _in_parts(values.reshape(rows, -1), k, max_columns)
    return values, jnp.take_along_axis(columns.reshape(rows, -1), places, axis=1)


def _cut(x: jax.Array, size: int) -> jax.Array:
    """Cut rows [n, V] into parts [n, V / size rounded up, size].

    Padding is never chosen before a real column: it is -inf and comes last.
    """
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=-jnp.inf)
    return x.reshape(len(x), -1, size)

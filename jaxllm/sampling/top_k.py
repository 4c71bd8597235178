"""The k largest of each row of logits: exactly `jax.lax.top_k`, made of narrow ones.

XLA compiles one `top_k` over a vocabulary for a TPU in 7 to 10 CPU seconds, which was a third of a
whole step's; over no more columns than a vector register has, in less than half a second. So
columns that cannot be among the k are left out first, by the maxima of blocks. All choices prefer
the first of equals, as `top_k` does. On a CPU only the number of calls and columns counts.
"""

import functools

import jax
import jax.numpy as jnp
from jaxllm_kernels.common import cdiv

_BLOCK = 64
_WIDEST = 128  # columns of one XLA top_k
_LARGEST_K = 32  # above, narrow ones would leave little out


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest values of each row of f32 [n, V], best first, and their columns, i32."""
    rows, width = x.shape
    if k > _LARGEST_K or cdiv(width, _BLOCK) <= max(k, 1):
        values, columns = jax.lax.top_k(x, k)
        return values, columns
    blocks = _cut(x, _BLOCK)
    # The k largest are in the k blocks with the largest maxima; in order, so that columns are, too.
    _, chosen = _narrow_top_k(jnp.max(blocks, axis=2), k)
    chosen = jnp.sort(chosen, axis=1)
    found = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1).reshape(rows, -1)
    values, places = _narrow_top_k(found, k)
    block = jnp.take_along_axis(chosen, places // _BLOCK, axis=1)
    return values, block * _BLOCK + places % _BLOCK


def _narrow_top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each row, with no wide `top_k` where compiling one takes long."""
    values, columns = jax.lax.platform_dependent(
        x, cpu=lambda x: tuple(jax.lax.top_k(x, k)), default=functools.partial(_in_parts, k=k)
    )
    return values, columns


def _in_parts(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest of each part of a row, then of what is left, until one part is left."""
    rows, width = x.shape
    if width <= _WIDEST:
        values, columns = jax.lax.top_k(x, k)
        return values, columns
    parts = _cut(x, _WIDEST)
    values, places = jax.lax.top_k(parts, k)
    columns = places + _WIDEST * jnp.arange(parts.shape[1], dtype=jnp.int32)[:, None]
    values, places = _in_parts(values.reshape(rows, -1), k)
    return values, jnp.take_along_axis(columns.reshape(rows, -1), places, axis=1)


def _cut(x: jax.Array, size: int) -> jax.Array:
    """Rows [n, V] as parts [n, V / size rounded up, size]; what is missing is never chosen, since
    it is no larger than anything and comes last."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=-jnp.inf)
    return x.reshape(len(x), -1, size)

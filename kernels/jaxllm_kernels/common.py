"""Small helpers that several ops share."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def cdiv(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple that is at least a."""
    return cdiv(a, multiple) * multiple


def storage_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The type in which an array that is updated in place keeps values of a floating type.

    XLA:CPU has no scatter of floats below 32 bits: it converts the whole operand to float32 and
    back, for every update. So they are kept as their bits.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return jnp.dtype({1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize, dtype))


def to_storage(x: jax.Array) -> jax.Array:
    """Values as `storage_dtype` keeps them."""
    return jax.lax.bitcast_convert_type(x, storage_dtype(x.dtype))


def from_storage(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """What `to_storage` was given, as its dtype."""
    return jax.lax.bitcast_convert_type(x, dtype)

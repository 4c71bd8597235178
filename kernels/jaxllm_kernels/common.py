"""Small helpers for several ops."""

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
    """The dtype in which an array that is updated in place stores values of this dtype.

    XLA:CPU has no scatter of floats below 32 bits: for every update it converts the whole operand
    to float32 and back. So these floats are stored as integers of the same bits.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return jnp.dtype({1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize, dtype))


def to_storage(x: jax.Array) -> jax.Array:
    """Reinterpret values as their `storage_dtype`."""
    return jax.lax.bitcast_convert_type(x, storage_dtype(x.dtype))


def from_storage(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Reinterpret stored values as a dtype; the inverse of `to_storage`."""
    return jax.lax.bitcast_convert_type(x, dtype)

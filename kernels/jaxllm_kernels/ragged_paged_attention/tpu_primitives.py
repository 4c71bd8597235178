"""What the two TPU kernels compute and count with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.ragged_paged_attention.tpu_layout import SUBLANES

# A reference to memory. (Type checkers know only a part of `jax.Ref`.)
Ref = Any

# The kernels' scores are logarithms to the base 2, of which the hardware computes exponentials.
LOG2_E = 1.4426950408889634

# The score of a key that is not seen. It is finite, because a chunk may have only such keys for a
# query: their weights are one. As soon as the query sees a key, exp(UNSEEN - score) = 0 multiplies
# them.
UNSEEN = float(jnp.finfo(jnp.float32).min)


def for_each(start: int | jax.Array, end: int | jax.Array, body: Callable) -> None:
    """Call body with every index."""
    if isinstance(end, int) and end == 1:
        body(0)
    else:
        lax.fori_loop(start, end, lambda i, _: body(i), None)


def for_each_unrolled(num: jax.Array, batch: int, body: Callable[[jax.Array, int], None]) -> None:
    """Call body with the first index and the number of consecutive indices, which is a batch or
    one, until each index had its turn."""
    num_batches = divide(num, batch)
    for_each(0, num_batches, lambda index: body(index * batch, batch))
    for_each(num_batches * batch, num, lambda index: body(index, 1))


def for_each_in_batches(num: int, batch: int, body: Callable) -> None:
    """Call body with every index; those of a batch overlap."""

    def for_batch(index: jax.Array) -> None:
        for i in range(batch):
            body(index * batch + i)

    for_each(0, num // batch, for_batch)


def multiple_of(x: int | jax.Array, n: int) -> Any:
    """Tell the compiler that n divides x."""
    return x if isinstance(x, int) else pl.multiple_of(x, n)


def cdiv(a: int | jax.Array, b: int) -> jax.Array:
    """Divide a non-negative number and round up."""
    return divide(a + (b - 1), b)


def divide(a: Any, b: int) -> jax.Array:
    """Divide a non-negative number and round down. By a power of two that is one instruction, where
    a division of numbers with a sign is six."""
    return a >> (b.bit_length() - 1) if b.bit_count() == 1 else lax.div(a, b)


def remainder(a: Any, b: int) -> jax.Array:
    """What `divide` leaves."""
    return a & (b - 1) if b.bit_count() == 1 else lax.rem(a, b)


def registers(x: jax.Array) -> jax.Array:
    """x [rows, lanes] as rows of registers: [rows / SUBLANES, SUBLANES, lanes]."""
    return x.reshape(-1, SUBLANES, x.shape[-1])


def dot(a: jax.Array, b: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    """A matrix product in float32 that sums over one axis of each operand."""
    i, j = contract
    return lax.dot_general(
        a,
        b,
        dimension_numbers=(((i,), (j,)), ((), ())),
        precision=_precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def batch_dot(a: jax.Array, b: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    """Matrix products in float32 over the first axis."""
    i, j = contract
    return lax.dot_general(
        a,
        b,
        dimension_numbers=(((i,), (j,)), ((0,), (0,))),
        precision=_precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def _precision(dtype: jnp.dtype) -> lax.Precision:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def cast(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Convert a float32 array whose values are exact in the dtype."""
    if jnp.issubdtype(dtype, jnp.integer):
        x = x.astype(jnp.int32)
    return x.astype(dtype)


def keep_first_rows(x: jax.Array, num_rows: jax.Array) -> jax.Array:
    """x [batch, rows, lanes] with zeros from row `num_rows` on.

    Rows share 32-bit words with their neighbours, and not every chip compares or selects in small
    dtypes. So this masks words.
    """
    rows_per_word = 4 // x.dtype.itemsize
    batch, rows, lanes = x.shape
    words = pltpu.bitcast(x.reshape(batch * rows, lanes), jnp.int32)
    words = words.reshape(batch, -1, SUBLANES, lanes)
    # Rows that are left from a word of a register's first word on; for the other registers it
    # differs by a constant.
    left = num_rows - rows_per_word * lax.broadcasted_iota(jnp.int32, (1, 1, SUBLANES, lanes), 2)
    register = lax.broadcasted_iota(jnp.int32, (1, words.shape[1], SUBLANES, lanes), 1)
    before = register * (SUBLANES * rows_per_word)
    mask = jnp.zeros_like(before)
    for kept in range(1, rows_per_word + 1):
        kept_bits = -1 if kept == rows_per_word else (1 << (kept * 8 * x.dtype.itemsize)) - 1
        mask = jnp.where(left >= before + kept, kept_bits, mask)
    words = (words & mask).reshape(-1, lanes)
    return pltpu.bitcast(words, x.dtype).reshape(x.shape)

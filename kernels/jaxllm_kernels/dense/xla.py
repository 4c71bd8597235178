"""Products as XLA does them."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class XlaMatmul:
    """`api.Matmul` on every platform."""

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        # Accelerators multiply float32 in fewer bits unless told otherwise; who asks for float32
        # means it.
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return jax.lax.dot_general(
            x,
            weight,
            (((x.ndim - 1,), (1,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )


@dataclass(frozen=True)
class RoundedXlaMatmul:
    """`api.Matmul` for who rounds the product to x's type before anything else is done with it: it
    is written as that.

    The sum is the same. But half as many bytes go through memory where the product comes from a
    library (cuBLAS), after which XLA would have to round in a kernel of its own. And where a sum
    goes over devices each rounds its part, so that they exchange half as many bytes, and XLA adds
    up a decode's few rows by its quicker way.
    """

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        if x.dtype == jnp.float32:
            return XlaMatmul()(x, weight)
        product = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
        return product.astype(jnp.float32)

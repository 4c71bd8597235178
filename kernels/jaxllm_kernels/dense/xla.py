"""Matrix products by XLA."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class XlaMatmul:
    """`api.Matmul` on every platform."""

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        # By default accelerators multiply float32 with fewer bits, but a float32 model needs all.
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
    """`api.Matmul` for callers that round the product to x's dtype at once. XLA sees the product in
    that dtype.

    The sum is the same. If the product comes from a library (cuBLAS), this halves the bytes that go
    through memory, and XLA needs no kernel to round. If a sum goes over devices, each rounds its
    part. They exchange half the bytes, and XLA uses its faster all-reduce for a decode's few rows.
    """

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        if x.dtype == jnp.float32:
            return XlaMatmul()(x, weight)
        product = jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
        return product.astype(jnp.float32)

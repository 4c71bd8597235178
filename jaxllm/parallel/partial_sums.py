"""The product with a weight that is cut along what is summed over."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxllm_kernels.dense.api import XLA


@dataclass(frozen=True)
class RoundedParts:
    """A `Matmul` whose devices round their parts of the sum to x's type before they add them up.

    Each part is summed in float32. What devices then exchange is half of what it would be in
    float32, and XLA adds up a decode's few rows by its quicker way.
    """

    def __call__(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        if x.dtype == jnp.float32:
            return XLA(x, weight)
        along = (((x.ndim - 1,), (1,)), ((), ()))
        parts = jax.lax.dot_general(x, weight, along, preferred_element_type=x.dtype)
        return parts.astype(jnp.float32)

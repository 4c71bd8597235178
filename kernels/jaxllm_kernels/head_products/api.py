"""The contract of products of each head's rows with a matrix of that head, as latent attention has
them before and after it attends.

Sums are of float32, and results are rounded once, to x's dtype. Implementations are frozen
dataclasses, as those of `dense.api.Matmul`.
"""

from typing import Protocol

import jax


class HeadProducts(Protocol):
    @property
    def name(self) -> str:
        """For logs and reports."""
        ...

    def times(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x [T, N, in] times weight [N, in, out]: [T, N, out]."""
        ...

    def times_transposed(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x [T, N, in] times weight [N, out, in]: [T, N, out]."""
        ...

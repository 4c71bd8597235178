"""The contract of sums over the last axis in a fixed order.

XLA chooses the order of a sum by the shape of the whole array, so a row among others may have other
bits than the same row alone. Here the order is the row's own.
"""

from typing import Protocol

import jax


class RowSums(Protocol):
    """Implementations are frozen dataclasses, as those of `dense.api.Matmul`."""

    def total(self, x: jax.Array) -> jax.Array:
        """The sums of x [..., n]: float32 [...]. A sum depends on nothing but its row."""
        ...

    def squares(self, x: jax.Array) -> jax.Array:
        """The sums of the squares of x [..., n]: float32 [...]."""
        ...

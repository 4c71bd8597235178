"""The contract of the sum of the residual stream and an output, with the RMSNorm that follows."""

from dataclasses import dataclass
from typing import Protocol

import jax


@dataclass(frozen=True, kw_only=True)
class RMSNormConfig:
    """The static part of the norm."""

    eps: float
    # What is added to the weight.
    offset: float = 0.0
    # Whether the result is rounded before the weight multiplies it, not after.
    rounds_first: bool = True


class AddNorm(Protocol):
    """Implementations are static arguments of jitted functions, so they must be hashable. They are
    traced by the caller."""

    def supports(self, size: int, dtype: jax.typing.DTypeLike) -> bool:
        """Whether rows of this size and dtype can be computed."""
        ...

    def __call__(
        self, stream: jax.Array, output: jax.Array, weight: jax.Array | None, config: RMSNormConfig
    ) -> tuple[jax.Array, jax.Array]:
        """Return stream + output, both [T, D], rounded to their dtype, and the norm of that.

        Sums and the norm are computed in float32. `weight` is [D]; None: there is none.
        """
        ...

"""The state space of Mamba2 (SSD): the contract of every implementation.

A head keeps a matrix S [P, K]. Each token lets it decay, adds its input to it, and reads it. The
longer the token's step is, the more is lost, and the more is added:

    S <- exp(step * rate) S + step x b^T
    out = S c

One call computes one layer for one step of the engine, of whose rows some go on from the states
that earlier ones have left (see `recurrent.rows`).

Axis letters: T tokens, N heads, G groups of heads, P head size, K state size, S slots.
"""

from typing import Protocol

import jax

from jaxllm_kernels.recurrent.rows import StateRows


class SsdOp(Protocol):
    """An implementation. It is a static argument of jitted functions: a frozen dataclass."""

    @property
    def name(self) -> str:
        """For logs and reports."""
        ...

    def __call__(
        self,
        x: jax.Array,
        b: jax.Array,
        c: jax.Array,
        step: jax.Array,
        rate: jax.Array,
        state: jax.Array,
        rows: StateRows,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the outputs, float32 [T, N, P], and the states after the step.

        Args:
          x: [T, N, P].
          b, c: [T, G, K]. Head n has those of group n // (N // G).
          step: float32 [T, N], not below zero.
          rate: float32 [N], not above zero.
          state: float32 [S, N, P, K]. Donate it: it is updated in place.

        Everything is computed in float32. A row's results do not depend on other rows, and on the
        borders of its chunks only by the order of sums. Operands of padding have no influence,
        whatever they are; its outputs are finite.
        """
        ...

"""Short causal convolution: the contract of every implementation.

Each channel is a filter of W taps over the tokens of its own sequence, with zeros before the first:

    out_t = activation(bias + sum over j < W of weight_(W - 1 - j) x_(t - j))

The state has the last inputs of each request, the newest last: W - 1 of them, which the next token
needs, or more. It goes on from row to row (see `recurrent.rows`).

Axis letters: T tokens, C channels, W width, I inputs of a state, S slots.
"""

from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.common import storage_dtype
from jaxllm_kernels.recurrent.rows import StateRows

Activation = Literal["silu"]


class ConvOp(Protocol):
    """An implementation. It is a static argument of jitted functions: a frozen dataclass."""

    @property
    def name(self) -> str:
        """For logs and reports."""
        ...

    def num_inputs(self, width: int) -> int:
        """The inputs that a state has: W - 1 or more."""
        ...

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None,
        state: jax.Array,
        rows: StateRows,
        *,
        activation: Activation | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return the outputs [T, C], of x's dtype, and the states after the step.

        Args:
          x: [T, C].
          weight: [W, C]; the last tap is that of the token itself.
          bias: [C].
          state: [S, I, C] of `state_dtype`. Donate it: it is updated in place.

        Sums are float32. A row's results do not depend on other rows. What padding has, has no
        influence; its outputs are arbitrary.
        """
        ...


def state_dtype(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which states hold inputs of a dtype: small floats are their bits."""
    return storage_dtype(dtype)


def activate(y: jax.Array, activation: Activation | None) -> jax.Array:
    return y if activation is None else jax.nn.silu(y)

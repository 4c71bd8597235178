"""The experts of a layer: the contract of every implementation.

One call computes the experts that its tokens have chosen, and each token's weighted sum of them.
Routing is not part of the op. With experts cut or spread over devices, a device computes its own
share of the sums, and the caller adds the shares up.

Axis letters: T tokens, k choices of a token, E experts, F intermediate size, D hidden size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxllm_kernels.coded import CodedWeight, CodeForm


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """The static part of a layer's experts; equal for layers of the same kind.

    Between its matrices an expert computes (up + up_offset) * gate * sigmoid(gate_slope * (gate +
    gate_cubic * gate^3)), or relu(up)^2 if it has no gate.
    """

    is_gated: bool = True

    gate_slope: float = 1.0
    gate_cubic: float = 0.0
    up_offset: float = 0.0
    # Before that, gate is clamped from above, and up from both sides.
    limit: float | None = None
    # Whether the factor of a choice multiplies the expert's input, not its output.
    scales_input: bool = False

    @property
    def num_halves(self) -> int:
        """How many matrices multiply the expert's input: gate and up, or up alone."""
        return 2 if self.is_gated else 1


# gate * sigmoid(2 u) is 0.5 * gate * (1 + tanh(u)): GELU, by its approximation with tanh.
GELU_TANH = ExpertsConfig(gate_slope=2 * math.sqrt(2 / math.pi), gate_cubic=0.044715)


class ExpertWeights(NamedTuple):
    """The weights of all experts; biases are None in models without them. Matrices may be codes."""

    gate_up: jax.Array | CodedWeight  # [E, 2, F, D]: gate, then up; or [E, 1, F, D]: up alone
    down: jax.Array | CodedWeight  # [E, D, F]
    gate_up_bias: jax.Array | None = None  # [E, 2, F], or [E, 1, F]
    down_bias: jax.Array | None = None  # [E, D]

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    @property
    def num_halves(self) -> int:
        """2: gate and up; 1: up alone."""
        return self.gate_up.shape[1]

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """Both matrices, for implementations that multiply by no codes."""
        gate_up, down = self.gate_up, self.down
        assert not isinstance(gate_up, CodedWeight) and not isinstance(down, CodedWeight)
        return gate_up, down


class ExpertsOp(Protocol):
    """An implementation. It is a static argument of jitted functions: a frozen dataclass."""

    @property
    def name(self) -> str:
        """For logs and reports."""
        ...

    def held(self, form: CodeForm, num_outputs: int, num_inputs: int) -> CodeForm:
        """The form in which it takes matrices [out, in] of experts that a checkpoint has in this
        form, as `dense.api.CodedMatmul` has it. Raises ValueError, which says why, if it has no
        products with such weights."""
        ...

    def __call__(
        self,
        x: jax.Array,
        chosen: jax.Array,
        factors: jax.Array,
        weights: ExpertWeights,
        *,
        config: ExpertsConfig,
    ) -> jax.Array:
        """Return each token's weighted sum of the outputs of its experts, float32 [T, D].

        Args:
          x: [T, D], in the dtype of the weights, unless these are codes.
          chosen: int32 [T, k], the numbers of a token's experts, all different. A number outside of
            [0, E) is no expert of this device: it adds nothing and costs nothing. So padding names
            such numbers.
          factors: float32 [T, k].

        Products are summed in float32. The input of the down projection is rounded to x's dtype. A
        token's sum goes over its experts by their number. So a token's result does not depend on
        other tokens, as far as the products do not.
        """
        ...


def between(halves: Sequence[jax.Array], config: ExpertsConfig) -> jax.Array:
    """What an expert computes between its matrices, in float32, from gate and up, or up alone."""
    if config.is_gated:
        gate, up = halves
        return activate(gate, up, config)
    (up,) = halves
    up = jnp.maximum(up, 0.0)
    return up * up


def activate(gate: jax.Array, up: jax.Array, config: ExpertsConfig) -> jax.Array:
    """What an expert with a gate computes between its matrices, in float32."""
    if config.limit is not None:
        gate, up = jnp.minimum(gate, config.limit), jnp.clip(up, -config.limit, config.limit)
    inner = gate
    if config.gate_cubic:
        inner = gate + config.gate_cubic * gate * gate * gate
    return (up + config.up_offset) * gate * jax.nn.sigmoid(config.gate_slope * inner)

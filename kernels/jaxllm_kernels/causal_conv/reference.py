"""The simplest correct implementation: the formula, token by token. For tests only."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.causal_conv.api import Activation, activate
from jaxllm_kernels.common import from_storage, to_storage
from jaxllm_kernels.recurrent.reference import scan_tokens
from jaxllm_kernels.recurrent.rows import StateRows


@dataclass(frozen=True)
class ReferenceConv:
    """`api.ConvOp`, one token after the other."""

    name: str = "reference"

    def num_inputs(self, width: int) -> int:
        return width - 1

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
        taps = weight.astype(jnp.float32)

        def step(state, token):
            inputs = jnp.concatenate([from_storage(state, x.dtype), token[None]])
            y = (taps * inputs.astype(jnp.float32)).sum(axis=0)
            if bias is not None:
                y = y + bias.astype(jnp.float32)
            return to_storage(inputs[1:]), activate(y, activation)

        out, state = scan_tokens(step, x, state, rows, out_shape=x.shape[1:])
        return out.astype(x.dtype), state

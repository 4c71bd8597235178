"""The simplest correct implementation: the formula, token by token. For tests only."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.recurrent.reference import scan_tokens
from jaxllm_kernels.recurrent.rows import StateRows


@dataclass(frozen=True)
class ReferenceSsd:
    """`api.SsdOp`, one token after the other."""

    name: str = "reference"

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
        heads_of_group = x.shape[1] // b.shape[1]

        def advance(state, token):
            x, b, c, step = token
            b, c = (jnp.repeat(it.astype(jnp.float32), heads_of_group, axis=0) for it in (b, c))
            added = (step[:, None] * x.astype(jnp.float32))[:, :, None] * b[:, None, :]
            state = jnp.exp(step * rate)[:, None, None] * state + added
            return state, (state * c[:, None, :]).sum(axis=2)

        return scan_tokens(advance, (x, b, c, step), state, rows, out_shape=x.shape[1:])

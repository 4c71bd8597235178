"""The simplest correct implementation: the formula, token by token. For tests only."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.recurrent.reference import scan_tokens
from jaxllm_kernels.recurrent.rows import StateRows


@dataclass(frozen=True)
class ReferenceDelta:
    """`api.DeltaOp`, one token after the other."""

    name: str = "reference"

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array,
        state: jax.Array,
        rows: StateRows,
    ) -> tuple[jax.Array, jax.Array]:
        repeats = v.shape[1] // q.shape[1]

        def step(state, token):
            q, k, v, log_decay, beta = token
            q, k = (jnp.repeat(x.astype(jnp.float32), repeats, axis=0) for x in (q, k))
            state = jnp.exp(log_decay.reshape(len(v), -1, 1)) * state
            held = (state * k[:, :, None]).sum(axis=1)
            change = beta[:, None] * (v.astype(jnp.float32) - held)
            state = state + k[:, :, None] * change[:, None, :]
            return state, (state * q[:, :, None]).sum(axis=1)

        return scan_tokens(step, (q, k, v, log_decay, beta), state, rows, out_shape=v.shape[1:])

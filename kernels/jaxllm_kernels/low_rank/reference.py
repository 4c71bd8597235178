"""The simplest correct implementation: each token gathers its matrices. For tests only."""

import jax
import jax.numpy as jnp

from jaxllm_kernels.low_rank.api import LowRank


def reference(x: jax.Array, weights: LowRank, slots: jax.Array) -> jax.Array:
    """`api.LowRankOp`."""

    def of_tokens(matrices: jax.Array) -> jax.Array:
        return matrices.at[slots].get(mode="fill", fill_value=0).astype(jnp.float32)

    exact = jax.lax.Precision.HIGHEST
    inner = jnp.einsum("td,tprd->tpr", x.astype(jnp.float32), of_tokens(weights.a), precision=exact)
    parts = [
        jnp.einsum("tr,trsc->tsc", inner[:, part], of_tokens(b), precision=exact)
        for part, b in enumerate(weights.b)
    ]
    return jnp.concatenate(parts, axis=-1).reshape(len(x), -1)

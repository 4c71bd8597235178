"""The simplest correct implementation: all scores, and a mask. For tests only."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig


@dataclass(frozen=True)
class ReferenceSelfAttention:
    """`api.SelfAttentionOp` with every pair of tokens."""

    name: str = "reference"

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        query_starts: jax.Array,
        config: SelfAttentionConfig,
    ) -> jax.Array:
        groups = q.shape[1] // k.shape[1]
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
        places = jnp.arange(len(q))
        rows = jnp.searchsorted(query_starts[1:], places, side="right")
        sees = rows[:, None] == rows
        if config.reach is not None:
            sees &= abs(places[:, None] - places) <= config.reach
        scores = config.scale * jnp.einsum("qnh,knh->nqk", q, k)
        weights = jax.nn.softmax(jnp.where(sees, scores, -jnp.inf), axis=-1)
        return jnp.einsum("nqk,knh->qnh", weights, v)

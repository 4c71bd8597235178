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
        query_ends: jax.Array | None = None,
    ) -> jax.Array:
        groups = q.shape[1] // k.shape[1]
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (jnp.repeat(x, groups, axis=1) for x in (k, v))
        places = jnp.arange(len(q))
        starts, ends = query_starts[:-1], query_starts[1:] if query_ends is None else query_ends
        is_in = (places[:, None] >= starts) & (places[:, None] < ends)  # [T, R]
        # Padding sees itself.
        sees = (is_in[:, None] & is_in).any(axis=-1) | (places[:, None] == places)
        if config.reach is not None:
            sees &= abs(places[:, None] - places) <= config.reach
        if config.causal:
            sees &= places <= places[:, None]
        scores = config.scale * jnp.einsum("qnh,knh->nqk", q, k)
        weights = jax.nn.softmax(jnp.where(sees, scores, -jnp.inf), axis=-1)
        return jnp.einsum("nqk,knh->qnh", weights, v)

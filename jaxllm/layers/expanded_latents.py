"""Latent attention with keys and values of heads, for whole prompts.

A row of a step is *fresh* if it begins a sequence and has many tokens: all that these see is in the
step. Keys and values of a head are smaller than a latent, so a pair of tokens takes fewer products
with them than with absorbed matrices: 320 numbers in place of 1088 in DeepSeek V3. They are made
once for each token, and thrown away behind the layer: the cache has latents only, as of any row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch, fresh_rows
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig, SelfAttentionOp

from jaxllm.layers.state import on_shards
from jaxllm.parallel.sharding import Axes

_HEADS: Axes = (None, "heads")


@dataclass(frozen=True, kw_only=True)
class ExpandedForm:
    """Which rows of a step are fresh, and what computes them. The plan chooses it."""

    op: SelfAttentionOp
    # Two or more: of a row with fewer tokens, absorbed attention has less work than making keys and
    # values has.
    fewest_tokens: int

    def rows_of(self, batch: RaggedBatch, num_tokens: int) -> "FreshRows | None":
        """The fresh rows of a batch; None: a program of this shape has none."""
        if batch.decode_only or num_tokens < self.fewest_tokens:
            return None
        starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
        is_fresh = fresh_rows(batch, self.fewest_tokens)
        tokens = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
        is_in = (starts <= tokens) & (tokens < ends)
        return FreshRows(
            starts=batch.query_starts,
            ends=jnp.where(is_fresh, ends, starts),
            has_tokens=(is_in & is_fresh).any(axis=1),
            are_there=is_fresh.any(),
            others_are_there=(~is_fresh & (starts < ends)).any(),
        )


class FreshRows(NamedTuple):
    """The fresh rows among those of a step."""

    starts: jax.Array  # int32 [R + 1]: of all rows, and the end of the last one
    ends: jax.Array  # int32 [R]: of other rows their starts
    has_tokens: jax.Array  # bool [T]: whether a token is in a fresh row
    are_there: jax.Array  # bool []
    others_are_there: jax.Array  # bool []

    def attend(
        self,
        form: ExpandedForm,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        scale: float,
        mesh: Mesh | None,
    ) -> jax.Array:
        """Let tokens of fresh rows see their row up to themselves: [T, N, V] of q and k [T, N, H]
        and v [T, N, V], cut by heads over the mesh."""
        config = SelfAttentionConfig(scale=scale, causal=True)

        def attend(
            q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array, ends: jax.Array
        ) -> jax.Array:
            return form.op(q, k, v, starts, config, ends)

        operands = (q, k, v, self.starts, self.ends)
        return on_shards(attend, operands, (_HEADS, _HEADS, _HEADS, (), ()), _HEADS, mesh)

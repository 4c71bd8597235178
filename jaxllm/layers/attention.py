"""Self-attention around the paged cache: projections, rotary embedding, the attention op.

The op owns the cache's layout; this layer only carries the array from call to call.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionBackend,
    AttentionConfig,
    RaggedBatch,
)

from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import Rotary, rotate


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What all attention layers of a step share."""

    batch: RaggedBatch
    prepared: Any  # what backend.prepare made of the batch
    backend: AttentionBackend = field(metadata={"static": True})


class Attention(nnx.Module):
    """Grouped-query attention with a fused q/k/v projection."""

    def __init__(
        self,
        config: AttentionConfig,
        *,
        hidden_size: int,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm_eps: float | None,
        dtype: DTypeLike,
    ):
        """Make the layer; with qk_norm_eps every query and key head is normalised."""
        self.config = config
        q_size = config.num_heads * config.head_size
        qkv_size = q_size + 2 * config.num_kv_heads * config.head_size
        self.qkv_proj = Linear(hidden_size, qkv_size, bias=qkv_bias, dtype=dtype)
        self.o_proj = Linear(q_size, hidden_size, bias=o_bias, dtype=dtype)
        self.q_norm = _head_norm(config, qk_norm_eps, dtype)
        self.k_norm = _head_norm(config, qk_norm_eps, dtype)

    def __call__(
        self, x: jax.Array, rotations: Rotary, cache: jax.Array, context: AttentionContext
    ) -> tuple[jax.Array, jax.Array]:
        """Attend from x [T, D]; return [T, D] and the cache with this step's keys and values."""
        with jax.named_scope("attention"):
            num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
            heads = self.qkv_proj(x).reshape(len(x), -1, self.config.head_size)
            q = heads[:, :num_heads]
            k = heads[:, num_heads : num_heads + num_kv_heads]
            v = heads[:, num_heads + num_kv_heads :]
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            out, cache = context.backend.attend(
                rotate(q, rotations),
                rotate(k, rotations),
                v,
                cache,
                context.batch,
                context.prepared,
                config=self.config,
            )
            return self.o_proj(out.reshape(len(x), -1)), cache


def _head_norm(config: AttentionConfig, eps: float | None, dtype: DTypeLike) -> RMSNorm | None:
    return None if eps is None else RMSNorm(config.head_size, eps=eps, dtype=dtype)

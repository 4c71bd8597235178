"""Self-attention around the paged cache: projections, rotary embedding, the attention op.

The op owns the cache's layout; this layer only carries the array from call to call.
"""

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionBackend,
    AttentionConfig,
    RaggedBatch,
)

from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import Rotary, rotate
from jaxllm.parallel.sharding import Axes, Part, partition_spec


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AttentionContext:
    """What all attention layers of a step share."""

    batch: RaggedBatch
    prepared: Any  # what backend.prepare made of the batch
    backend: AttentionBackend = field(metadata={"static": True})
    # The devices over which heads are cut; None: there is one.
    mesh: Mesh | None = field(default=None, metadata={"static": True})


class Attention(nnx.Module):
    """Grouped-query attention with a fused q/k/v projection.

    Heads are cut over the shards. Fewer kv heads than shards are repeated until there is one for
    each, so that every shard has what its query heads attend to.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        hidden_size: int,
        num_shards: int,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm_eps: float | None,
        dtype: DTypeLike,
    ):
        """Make the layer of a model with these heads in all; with qk_norm_eps every query and key
        head is normalised."""
        copies = max(1, num_shards // config.num_kv_heads)
        # What one shard computes.
        self.config = dataclasses.replace(
            config,
            num_heads=config.num_heads // num_shards,
            num_kv_heads=config.num_kv_heads * copies // num_shards,
        )
        self.num_shards = num_shards
        q_size, kv_size = (
            heads * config.head_size for heads in (config.num_heads, config.num_kv_heads)
        )
        self.qkv_proj = Linear(
            hidden_size,
            q_size + 2 * kv_size * copies,
            bias=qkv_bias,
            axes=("heads", "hidden"),
            parts=(Part(q_size), Part(kv_size, copies), Part(kv_size, copies)),
            dtype=dtype,
        )
        self.o_proj = Linear(
            q_size, hidden_size, bias=o_bias, axes=("hidden", "heads"), dtype=dtype
        )
        self.q_norm = _head_norm(config, qk_norm_eps, dtype)
        self.k_norm = _head_norm(config, qk_norm_eps, dtype)

    def __call__(
        self, x: jax.Array, rotations: Rotary, cache: jax.Array, context: AttentionContext
    ) -> tuple[jax.Array, jax.Array]:
        """Attend from x [T, D]; return [T, D] and the cache with this step's keys and values."""
        with jax.named_scope("attention"):
            num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
            heads = self.qkv_proj(x).reshape(len(x), self.num_shards, -1, self.config.head_size)
            q, k, v = (
                part.reshape(len(x), -1, self.config.head_size)
                for part in jnp.split(heads, (num_heads, num_heads + num_kv_heads), axis=2)
            )
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
            out, cache = self._attend(rotate(q, rotations), rotate(k, rotations), v, cache, context)
            return self.o_proj(out.reshape(len(x), -1)), cache

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        context: AttentionContext,
    ) -> tuple[jax.Array, jax.Array]:
        """The attention op: each shard for its own heads, with no word between them."""
        attend = functools.partial(context.backend.attend, config=self.config)
        operands = (q, k, v, cache, context.batch, context.prepared)
        if context.mesh is None or context.mesh.size == 1:
            return attend(*operands)
        heads, whole = partition_spec((None, "heads")), partition_spec(())
        pages = partition_spec(cache_axes(context.backend))
        return jax.shard_map(
            attend,
            mesh=context.mesh,
            in_specs=(heads, heads, heads, pages, whole, whole),
            out_specs=(heads, pages),
            check_vma=False,
        )(*operands)


def cache_axes(backend: AttentionBackend) -> Axes:
    """Names of the first axes of a layer's cache; the others have none."""
    return (*(None for _ in range(backend.cache_head_axis)), "heads")


def _head_norm(config: AttentionConfig, eps: float | None, dtype: DTypeLike) -> RMSNorm | None:
    return None if eps is None else RMSNorm(config.head_size, eps=eps, dtype=dtype)

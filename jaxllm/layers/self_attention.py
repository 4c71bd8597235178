"""Self-attention of encoders: every token sees all of its text, and nothing is cached.

A mixer that keeps nothing is one with an empty state.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig

from jaxllm.errors import refused
from jaxllm.layers.context import Cache, StepContext
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import Norm, NormSpec
from jaxllm.layers.rope import RopeConfig, rotate
from jaxllm.layers.state import StateConfig, on_shards
from jaxllm.parallel.sharding import Axes, Part

_HEADS: Axes = (None, "heads")


@dataclass(frozen=True, kw_only=True)
class SelfAttentionSpec:
    """The static part of a layer's attention, for all heads together."""

    name: ClassVar[str] = "self_attn"

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    rope: RopeConfig | None = None
    # How far from it a token sees, on both sides; None: all of its text.
    reach: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: NormSpec | None = None  # of queries and keys
    norms_all_heads: bool = False  # together; False: each head by itself

    def check(self, num_shards: int) -> None:
        """Raise ValidationError unless the heads can be cut into equal shards."""
        for name in ("num_heads", "num_kv_heads"):
            if getattr(self, name) % num_shards:
                raise refused(
                    "tensor_parallel_size",
                    num_shards,
                    f"it does not divide the model's {name}={getattr(self, name)}",
                )

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "SelfAttention":
        return SelfAttention(self, hidden_size, num_shards=num_shards, dtype=dtype)


class SelfAttention(nnx.Module):
    """Grouped-query attention with a fused q/k/v projection. Heads are cut over the shards."""

    config = StateConfig(arrays=(), drafts=())

    def __init__(
        self, spec: SelfAttentionSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike
    ):
        self.spec = spec
        self.num_shards = num_shards
        q, kv = Part(spec.num_heads * spec.head_size), Part(spec.num_kv_heads * spec.head_size)
        self.qkv_proj = Linear(
            hidden_size,
            q.rows + 2 * kv.rows,
            bias=spec.qkv_bias,
            axes=("heads", "hidden"),
            parts=(q, kv, kv),
            dtype=dtype,
        )
        self.o_proj = Linear(
            q.rows, hidden_size, bias=spec.o_bias, axes=("hidden", "heads"), dtype=dtype
        )
        self.q_norm, self.k_norm = (
            None
            if spec.qk_norm is None
            else spec.qk_norm.make(rows if spec.norms_all_heads else spec.head_size, dtype=dtype)
            for rows in (q.rows, kv.rows)
        )

    def __call__(self, x: jax.Array, cache: Cache, context: StepContext) -> tuple[jax.Array, Cache]:
        """Attend from x [T, D]; return [T, D] and the cache, which is empty."""
        spec = self.spec
        with jax.named_scope("attention"):
            projected = self.qkv_proj(x).reshape(len(x), self.num_shards, -1, spec.head_size)
            num_q, num_kv = (n // self.num_shards for n in (spec.num_heads, spec.num_kv_heads))
            q, k, v = (
                projected[:, :, first:end].reshape(len(x), -1, spec.head_size)
                for first, end in (
                    (0, num_q),
                    (num_q, num_q + num_kv),
                    (num_q + num_kv, num_q + 2 * num_kv),
                )
            )
            q, k = (
                self._place(heads, norm, context)
                for heads, norm in ((q, self.q_norm), (k, self.k_norm))
            )
            out = attend(spec, q, k, v, context)
            return self.o_proj(out.reshape(len(x), -1)), cache

    def _place(self, x: jax.Array, norm: Norm | None, context: StepContext) -> jax.Array:
        if norm is not None:
            x = (
                norm(x.reshape(len(x), -1)).reshape(x.shape)
                if self.spec.norms_all_heads
                else norm(x)
            )
        if self.spec.rope is None:
            return x
        assert context.rotary is not None
        return rotate(x, context.rotary)


def attend(
    spec: SelfAttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, context: StepContext
) -> jax.Array:
    """Let tokens see their texts: heads [T, N, H] of queries and [T, K, H] of keys and values, cut
    over the shards. Return [T, N, H]."""
    ops = context.state_ops
    assert ops is not None, "the plan has chosen no op"
    return on_shards(
        functools.partial(
            ops.self_attention, config=SelfAttentionConfig(scale=spec.scale, reach=spec.reach)
        ),
        (q, k, v, context.paged[0].batch.query_starts),
        (_HEADS, _HEADS, _HEADS, ()),
        _HEADS,
        context.mesh,
    )

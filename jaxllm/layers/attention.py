"""Self-attention with a paged KV cache: projections, rotary embedding, the attention op.

The op defines the layout of the cache; this layer only passes the array on.
"""

import functools
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionBackend,
    AttentionConfig,
    KVScales,
    TakesHeads,
)

from jaxllm.cache_groups import window_of
from jaxllm.errors import refused
from jaxllm.layers.context import Cache, LentCache, MixerBackend, StepContext
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import Norm, NormSpec
from jaxllm.layers.rope import RopeConfig, rotate
from jaxllm.parallel.sharding import Axes, Part, num_pieces, partition_spec
from jaxllm.quantization.kv_cache import CachedCodes

_HEADS: Axes = (None, "heads")  # of queries, keys and values


@dataclass(frozen=True, kw_only=True)
class QKNorm:
    """A norm of queries and keys."""

    norm: NormSpec
    # Over all heads together; False: over each head.
    over_all_heads: bool = False
    # Whether each head has a weight of its own; False: all heads have the same one.
    has_weight_per_head: bool = False
    # Whether it comes after the rotation, not before.
    after_rope: bool = False


@dataclass(frozen=True, kw_only=True)
class Temperature:
    """Multiplies the query at position p by 1 + strength * log(1 + (p + first) // interval)."""

    strength: float
    interval: int
    first: int = 0  # the number of the first position

    def factors(self, positions: jax.Array) -> jax.Array:
        steps = ((positions + self.first) // self.interval).astype(jnp.float32)
        return 1.0 + self.strength * jnp.log1p(steps)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The static part of a layer's attention, for all heads together."""

    name: ClassVar[str] = "self_attn"

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int | None = None  # of values and outputs; None: head_size
    scale: float
    rope: RopeConfig | None  # None: no position embedding
    # The number of tokens that a token sees, itself included; None: all before it.
    window: int | None = None
    # Or it sees those of its own chunk, up to itself: contexts are cut into chunks of so many.
    chunk: int | None = None
    # Scores become soft_cap * tanh(scores / soft_cap).
    soft_cap: float | None = None
    # Whether every query head has the logit of one more key, with a value of zero.
    has_sinks: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    # Queries, keys and values are clamped to this distance from zero, before anything else.
    qkv_clip: float | None = None
    qk_norm: QKNorm | None = None
    v_norm: NormSpec | None = None  # of each head's values
    value_scale: float = 1.0  # of values, before they are cached
    temperature: Temperature | None = None
    # Whether values are the projected keys, as they are before their norm and rotation.
    values_are_keys: bool = False
    # Whether later layers attend to its keys and values, too ("lent"), or it has only queries, and
    # attends to those of an earlier layer ("borrowed").
    kv: Literal["own", "lent", "borrowed"] = "own"
    # How keys and values are cached; None: as they are. Borrowed ones are as their owner has them.
    cached: CachedCodes | None = None

    def check(self, num_shards: int) -> None:
        """Raise ValidationError unless the heads can be cut into equal shards."""
        if self.num_heads % num_shards:
            raise refused(
                "tensor_parallel_size",
                num_shards,
                f"it does not divide the model's num_attention_heads={self.num_heads}",
            )
        few, many = sorted((self.num_kv_heads, num_shards))
        if many % few:
            raise refused(
                "tensor_parallel_size",
                num_shards,
                "it is neither a divisor nor a multiple of the model's "
                f"num_key_value_heads={self.num_kv_heads}",
            )

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "Attention":
        return Attention(self, hidden_size, num_shards=num_shards, dtype=dtype)


class Attention(nnx.Module):
    """Grouped-query attention with a fused q/k/v projection.

    Heads are cut over the shards. If there are fewer kv heads than shards, they are repeated until
    each shard has one, so that a shard has the kv heads of its query heads. The projection lacks
    the values, or keys and values, if the layer has none of its own.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        *,
        input_size: int | None = None,
        num_shards: int,
        dtype: DTypeLike,
    ):
        """Make the layer. It returns vectors of `hidden_size`, and takes those of `input_size`;
        None: of the same."""
        copies = max(1, num_shards // spec.num_kv_heads)
        # The attention and the cache of one shard.
        self.config = AttentionConfig(
            num_heads=spec.num_heads // num_shards,
            num_kv_heads=spec.num_kv_heads * copies // num_shards,
            head_size=spec.head_size,
            scale=spec.scale,
            v_head_size=spec.v_head_size,
            sliding_window=spec.window,
            chunk=spec.chunk,
            soft_cap=spec.soft_cap,
            kv_dtype=None if spec.cached is None else spec.cached.codes,
        )
        self.spec = spec
        self.num_shards = num_shards
        value_size = self.config.value_size
        q = Part(spec.num_heads * spec.head_size)
        k, v = (Part(spec.num_kv_heads * size, copies) for size in (spec.head_size, value_size))
        parts = (q,) if spec.kv == "borrowed" else (q, k) if spec.values_are_keys else (q, k, v)
        assert not spec.values_are_keys or value_size == spec.head_size, spec
        self.num_parts = len(parts)
        self.qkv_proj = Linear(
            input_size or hidden_size,
            sum(part.rows * part.copies for part in parts),
            bias=spec.qkv_bias,
            axes=("heads", "hidden"),
            parts=parts,
            dtype=dtype,
        )
        self.o_proj = Linear(
            spec.num_heads * value_size,
            hidden_size,
            bias=spec.o_bias,
            axes=("hidden", "heads"),
            dtype=dtype,
        )
        self.q_norm = self._make_norm(spec.num_heads, 1, dtype)
        self.k_norm = (
            None if spec.kv == "borrowed" else self._make_norm(spec.num_kv_heads, copies, dtype)
        )
        self.v_norm = (
            None
            if spec.v_norm is None or spec.kv == "borrowed"
            else spec.v_norm.make(value_size, dtype=dtype)
        )
        self.sinks = (
            nnx.Param(jnp.zeros(spec.num_heads, dtype), axes=("heads",)) if spec.has_sinks else None
        )
        self.kv_scales = self._make_scales(Part(spec.num_kv_heads, copies))

    def _make_scales(self, heads: Part) -> nnx.Param | None:
        """Make the scales of cached keys and values, [K, 2]."""
        cached = self.spec.cached
        if cached is None or self.spec.kv == "borrowed":
            return None
        return nnx.Param(
            jnp.ones((heads.rows * heads.copies, 2), jnp.float32),
            axes=("heads", None),
            parts=(heads,),
            stored=cached.stored,
            constant=1.0 if cached.stored is None else None,
        )

    def _make_norm(self, heads: int, copies: int, dtype: DTypeLike) -> Norm | None:
        """Make the norm of queries or of keys, whose heads are repeated in `copies` shards."""
        qk_norm, head_size = self.spec.qk_norm, self.spec.head_size
        if qk_norm is None:
            return None
        if qk_norm.over_all_heads:
            # Repeated heads change neither mean nor mean square.
            size, part = heads * copies * head_size, Part(heads * head_size, copies)
            return qk_norm.norm.make(size, axes=("heads",), parts=(part,), dtype=dtype)
        if qk_norm.has_weight_per_head:
            size, part = (heads * copies, head_size), Part(heads, copies)
            return qk_norm.norm.make(size, axes=("heads", None), parts=(part,), dtype=dtype)
        return qk_norm.norm.make(head_size, dtype=dtype)

    def __call__(self, x: jax.Array, cache: Cache, context: StepContext) -> tuple[jax.Array, Cache]:
        """Attend from x [T, D]; return [T, D] and the cache with this step's keys and values."""
        with jax.named_scope("attention"):
            heads = self.qkv_proj(x).reshape(len(x), self.num_shards, -1)
            if (clip := self.spec.qkv_clip) is not None:
                heads = jnp.clip(heads, -clip, clip)
            if self._only_rotates(context):
                assert not isinstance(cache, LentCache)
                out, cache = self._attend_heads(heads, cache, context)
                return self.o_proj(out.reshape(len(x), -1)), cache
            q, *kv = self._cut(heads)
            q = self._heat(self._place(q, self.q_norm, context), context)
            if isinstance(cache, LentCache):
                pages, k, v, scales = cache
            else:
                pages, k, v = cache, self._place(kv[0], self.k_norm, context), kv[-1]
                scales = None if self.kv_scales is None else self.kv_scales[...]
                v = v if self.v_norm is None else self.v_norm(v)
                v = v if self.spec.value_scale == 1.0 else v * self.spec.value_scale
            out, pages = self._attend(q, k, v, pages, scales, context)
            cache = pages if self.spec.kv == "own" else LentCache(pages, k, v, scales)
            return self.o_proj(out.reshape(len(x), -1)), cache

    def _cut(self, projected: jax.Array) -> list[jax.Array]:
        """Cut [T, shards, ...] into queries, keys and values, or as many of them as there are, each
        [T, heads, size]."""
        config, num_tokens = self.config, len(projected)
        sizes = (config.head_size, config.head_size, config.value_size)[: self.num_parts]
        counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        if config.value_size == config.head_size:
            # Seen as heads before they are cut. Cut before, XLA for TPUs gives the heads their
            # layout after the rotation, in float32: four copies more a layer, of twice the bytes.
            projected = projected.reshape(*projected.shape[:2], -1, config.head_size)
            ends = itertools.accumulate(counts)
        else:
            ends = itertools.accumulate(map(operator.mul, counts, sizes))
        parts = jnp.split(projected, tuple(ends)[: self.num_parts - 1], axis=2)
        return [part.reshape(num_tokens, -1, size) for part, size in zip(parts, sizes, strict=True)]

    def _only_rotates(self, context: StepContext) -> bool:
        """Whether heads are at most rotated before they attend, and the backend does that, too."""
        spec, backend = self.spec, context.backend
        size = None if spec.rope is None else spec.rope.size
        return (
            isinstance(backend, TakesHeads)
            and spec.qk_norm is None
            and spec.v_norm is None
            and spec.value_scale == 1.0
            and spec.temperature is None
            and not spec.has_sinks
            and spec.cached is None
            and not spec.values_are_keys
            and spec.kv == "own"
            and backend.takes_heads(self.config, size)
        )

    def _attend_heads(
        self, heads: jax.Array, cache: jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        """Run the attention op on heads [T, shards, heads of a shard, H]."""
        backend = context.backend
        assert isinstance(backend, TakesHeads)
        attend = functools.partial(backend.attend_heads, config=self.config)
        heads = heads.reshape(len(heads), -1, self.config.head_size)
        rotary = None if self.spec.rope is None else context.rotary
        operands = (heads, rotary, cache, *context.of_window(window_of(self.config)))
        axes = (_HEADS, (), None, (), ())
        return self._on_shards(attend, operands, axes, context)

    def _place(self, x: jax.Array, norm: Norm | None, context: StepContext) -> jax.Array:
        """Normalise queries or keys, and give them their positions, as the spec says."""
        qk_norm = self.spec.qk_norm
        norm_is_last = qk_norm is not None and qk_norm.after_rope
        if not norm_is_last:
            x = self._normalise(x, norm)
        if self.spec.rope is not None:
            assert context.rotary is not None
            x = rotate(x, context.rotary)
        return self._normalise(x, norm) if norm_is_last else x

    def _normalise(self, x: jax.Array, norm: Norm | None) -> jax.Array:
        if norm is None:
            return x
        assert self.spec.qk_norm is not None
        if not self.spec.qk_norm.over_all_heads:
            return norm(x)
        return norm(x.reshape(len(x), -1)).reshape(x.shape)

    def _heat(self, q: jax.Array, context: StepContext) -> jax.Array:
        """Apply the temperature to queries."""
        if self.spec.temperature is None:
            return q
        assert context.positions is not None
        factors = self.spec.temperature.factors(context.positions)[:, None, None]
        return (q.astype(jnp.float32) * factors).astype(q.dtype)

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        scales: jax.Array | None,
        context: StepContext,
    ) -> tuple[jax.Array, jax.Array]:
        """Run the attention op. Each shard computes its own heads, without communication."""
        paged = context.of_window(window_of(self.config))
        sinks = None if self.sinks is None else self.sinks[...]

        def attend(*operands: Any) -> tuple[jax.Array, jax.Array]:
            *others, sinks, scales = operands
            backend = cast(AttentionBackend, context.backend)  # the plan has chosen it for configs
            more = {} if scales is None else {"kv_scales": KVScales(scales[:, 0], scales[:, 1])}
            return backend.attend(*others, config=self.config, sinks=sinks, **more)

        operands = (q, k, v, cache, *paged, sinks, scales)
        axes = (_HEADS, _HEADS, _HEADS, None, (), (), ("heads",), ("heads", None))
        return self._on_shards(attend, operands, axes, context)

    def _on_shards(
        self,
        attend: Callable[..., tuple[jax.Array, jax.Array]],
        operands: tuple[Any, ...],
        axes: tuple[Axes | None, ...],
        context: StepContext,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend on each shard. `axes` are those of the operands; None is for the cache's."""
        if context.mesh is None or num_pieces(context.mesh, ("heads",)) == 1:
            return attend(*operands)
        pages = cache_axes(context.backend)
        return jax.shard_map(
            attend,
            mesh=context.mesh,
            in_specs=tuple(partition_spec(pages if its is None else its) for its in axes),
            out_specs=(partition_spec(_HEADS), partition_spec(pages)),
            check_vma=False,
        )(*operands)


def cache_axes(backend: MixerBackend) -> Axes:
    """Logical names of the cache's axes, up to the head axis; the later ones have none, and neither
    has a cache without heads."""
    if backend.cache_head_axis is None:
        return ()
    return (*(None for _ in range(backend.cache_head_axis)), "heads")

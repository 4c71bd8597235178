"""Latent attention (MLA), as in DeepSeek V2 and V3: the cache keeps one latent for each token.

Keys and values of all heads are products of the latent with matrices of the heads. For what is in
the cache they are not made: the matrices are absorbed into the queries, and into what follows the
attention. Heads then attend to the latents themselves, and to a rotated key beside each latent,
which all heads share. Whole prompts of many tokens need nothing of the cache. For these rows keys
and values are made, where the plan says so (`expanded_latents.py`).

Query heads are cut over the shards, and with them the matrices of keys and values. The projection
to latents is whole on every shard, and so is the cache: every head reads every latent, so a shard
with a part of the latents would need the other parts for each token that it attends to.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.head_products.api import HeadProducts
from jaxllm_kernels.head_products.xla import XLA_HEADS
from jaxllm_kernels.mla.api import LatentBackend, LatentConfig

from jaxllm.errors import refused
from jaxllm.layers.attention import Temperature
from jaxllm.layers.context import Cache, StepContext
from jaxllm.layers.expanded_latents import ExpandedForm, FreshRows
from jaxllm.layers.linear import Linear, Product
from jaxllm.layers.norm import NormSpec
from jaxllm.layers.rope import RopeConfig, rotate
from jaxllm.parallel.sharding import Axes, Part, num_pieces, partition_spec

_HEADS: Axes = (None, "heads")  # of queries and outputs


@dataclass(frozen=True, kw_only=True)
class LatentAttentionSpec:
    """The static part of a layer's latent attention, for all heads together."""

    name: ClassVar[str] = "self_attn"

    num_heads: int
    latent_size: int
    # Of a head's queries and keys: the part that latents make, and the part that is rotated.
    nope_size: int
    rope_size: int
    v_head_size: int
    # The size of what queries are made of; None: they are made of the hidden state itself.
    q_latent_size: int | None
    scale: float
    rope: RopeConfig | None  # None: that part is not rotated
    # Whether checkpoints have the two members of a rotated pair side by side. They are loaded as
    # the halves that `rotate` takes.
    rope_interleave: bool = True
    norm: NormSpec  # of latents
    bias: bool = False  # of the projections to latents and of the output
    temperature: Temperature | None = None
    # How whole prompts are computed; None: as all other rows are.
    expanded: ExpandedForm | None = None

    def check(self, num_shards: int) -> None:
        """Raise ValidationError unless the heads can be cut into equal shards."""
        if self.num_heads % num_shards:
            raise refused(
                "tensor_parallel_size",
                num_shards,
                f"it does not divide the model's num_attention_heads={self.num_heads}",
            )

    def make(self, hidden_size: int, *, num_shards: int, dtype: DTypeLike) -> "LatentAttention":
        return LatentAttention(self, hidden_size, num_shards=num_shards, dtype=dtype)


class LatentAttention(nnx.Module):
    """Projections to latents, and attention to latents."""

    def __init__(
        self, spec: LatentAttentionSpec, hidden_size: int, *, num_shards: int, dtype: DTypeLike
    ):
        # The attention of one shard.
        self.config = LatentConfig(
            num_heads=spec.num_heads // num_shards,
            latent_size=spec.latent_size,
            rope_size=spec.rope_size,
            scale=spec.scale,
            fewest_fresh=0 if spec.expanded is None else spec.expanded.fewest_tokens,
        )
        self.spec = spec
        num_heads, row_size = spec.num_heads, self.config.head_size
        q_size = num_heads * (spec.nope_size + spec.rope_size)

        def linear(inputs: int, outputs: int, **options: Any) -> Linear:
            return Linear(inputs, outputs, dtype=dtype, **options)

        if spec.q_latent_size is None:
            self.kv_a_proj_with_mqa = linear(
                hidden_size, row_size, bias=spec.bias, axes=(None, "hidden")
            )
            self.q_proj = linear(hidden_size, q_size, bias=False, axes=("heads", "hidden"))
        else:
            self.fused_qkv_a_proj = linear(
                hidden_size,
                spec.q_latent_size + row_size,
                bias=spec.bias,
                axes=(None, "hidden"),
                parts=(Part(spec.q_latent_size), Part(row_size)),
            )
            self.q_a_layernorm = spec.norm.make(spec.q_latent_size, dtype=dtype)
            self.q_b_proj = linear(spec.q_latent_size, q_size, bias=False, axes=("heads", None))
        self.kv_a_layernorm = spec.norm.make(spec.latent_size, dtype=dtype)
        self.kv_b_proj = HeadMatrices(spec, dtype=dtype)
        self.o_proj = linear(
            num_heads * spec.v_head_size, hidden_size, bias=spec.bias, axes=("hidden", "heads")
        )

    def __call__(self, x: jax.Array, cache: Cache, context: StepContext) -> tuple[jax.Array, Cache]:
        """Attend from x [T, D]; return [T, D] and the cache with this step's latents."""
        assert isinstance(cache, jax.Array)
        spec = self.spec
        with jax.named_scope("latent_attention"):
            if spec.q_latent_size is None:
                q, row = self.q_proj(x), self.kv_a_proj_with_mqa(x)
            else:
                q_latent, row = jnp.split(self.fused_qkv_a_proj(x), [spec.q_latent_size], axis=-1)
                q = self.q_b_proj(self.q_a_layernorm(q_latent))
            q = self._heat(q.reshape(len(x), spec.num_heads, -1), context)
            q_nope, q_rope = jnp.split(q, [spec.nope_size], axis=-1)
            latent, k_rope = jnp.split(row, [spec.latent_size], axis=-1)
            if spec.rope is not None:
                assert context.rotary is not None
                q_rope = rotate(q_rope, context.rotary)
                k_rope = rotate(k_rope[:, None], context.rotary)[:, 0]
            row = jnp.concatenate([self.kv_a_layernorm(latent), k_rope], axis=-1)
            fresh = None
            if spec.expanded is not None:
                fresh = spec.expanded.rows_of(context.of_window(None).batch, len(x))
            out, cache = self._absorbed(q_nope, q_rope, row, cache, context, fresh)
            if fresh is not None:
                out = self._expanded(q_nope, q_rope, row, out, context, fresh)
            return self.o_proj(out.reshape(len(x), -1)), cache

    def _heat(self, q: jax.Array, context: StepContext) -> jax.Array:
        """Apply the temperature to queries."""
        if self.spec.temperature is None:
            return q
        assert context.positions is not None
        factors = self.spec.temperature.factors(context.positions)[:, None, None]
        return (q.astype(jnp.float32) * factors).astype(q.dtype)

    def _absorbed(
        self,
        q_nope: jax.Array,
        q_rope: jax.Array,
        row: jax.Array,
        cache: jax.Array,
        context: StepContext,
        fresh: FreshRows | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Write all latents, and attend to those of the cache: [T, N, V], in which fresh rows are
        arbitrary. A step of fresh rows alone multiplies nothing by the absorbed matrices."""

        def if_needed(product: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
            if fresh is None:
                return product(x)
            shape = jax.eval_shape(product, x)
            return jax.lax.cond(
                fresh.others_are_there, product, lambda _: jnp.zeros(shape.shape, shape.dtype), x
            )

        q = jnp.concatenate([if_needed(self.kv_b_proj.absorb, q_nope), q_rope], axis=-1)
        latents, cache = self._attend(q, row, cache, context)
        return if_needed(self.kv_b_proj.values, latents), cache

    def _expanded(
        self,
        q_nope: jax.Array,
        q_rope: jax.Array,
        row: jax.Array,
        out: jax.Array,
        context: StepContext,
        fresh: FreshRows,
    ) -> jax.Array:
        """Put the attention of fresh rows into out [T, N, V]. A step without them makes nothing."""
        form = self.spec.expanded
        assert form is not None

        def attend(q_nope: jax.Array, q_rope: jax.Array, row: jax.Array, out: jax.Array):
            latent, k_rope = jnp.split(row, [self.spec.latent_size], axis=-1)
            k_nope, v = self.kv_b_proj.keys_and_values(latent)
            k_rope = jnp.broadcast_to(k_rope[:, None], q_rope.shape)
            q, k = (
                jnp.concatenate(parts, axis=-1) for parts in ((q_nope, q_rope), (k_nope, k_rope))
            )
            expanded = fresh.attend(form, q, k, v, self.spec.scale, context.mesh)
            return jnp.where(fresh.has_tokens[:, None, None], expanded, out)

        operands = (q_nope, q_rope, row, out)
        return jax.lax.cond(fresh.are_there, attend, lambda *operands: operands[-1], *operands)

    def _attend(
        self, q: jax.Array, row: jax.Array, cache: jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        """Run the attention op. Each shard computes its own heads, and writes all latents."""
        # The plan has chosen it for these configs.
        backend = cast(LatentBackend, context.backend)
        attend = functools.partial(backend.attend, config=self.config)
        operands = (q, row, cache, *context.of_window(None))
        if context.mesh is None or num_pieces(context.mesh, ("heads",)) == 1:
            return attend(*operands)
        heads, whole = partition_spec(_HEADS), partition_spec(())
        return jax.shard_map(
            attend,
            mesh=context.mesh,
            in_specs=(heads, whole, whole, whole, whole),
            out_specs=(heads, whole),
            check_vma=False,
        )(*operands)


class HeadMatrices(Product):
    """The matrices of each head that make keys and values of a latent.

    A checkpoint has those of a head in one tensor; here they are apart, since queries absorb the
    ones, and outputs the others. The plan chooses the implementation of products with them:
    `products` of what differs by head, and `matmul` of latents, which are the same for all heads.
    """

    products: HeadProducts = XLA_HEADS

    def __init__(self, spec: LatentAttentionSpec, *, dtype: DTypeLike):
        def param(size: int) -> nnx.Param:
            shape = (spec.num_heads, size, spec.latent_size)
            return nnx.Param(jnp.zeros(shape, dtype), axes=("heads", None, None))

        self.k_weight = param(spec.nope_size)
        self.v_weight = param(spec.v_head_size)

    def absorb(self, q: jax.Array) -> jax.Array:
        """Queries against keys [T, N, nope] as queries against latents [T, N, L]."""
        return self.products.times(q, self.k_weight[...])

    def values(self, latents: jax.Array) -> jax.Array:
        """Weighted sums of latents [T, N, L] as those of values [T, N, V]."""
        return self.products.times_transposed(latents, self.v_weight[...])

    def keys_and_values(self, latents: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The keys [T, N, nope] and values [T, N, V] of latents [T, L]."""

        def of_heads(weight: jax.Array) -> jax.Array:
            num_heads, size, latent_size = weight.shape
            made = self.matmul(latents, weight.reshape(-1, latent_size)).astype(latents.dtype)
            return made.reshape(len(latents), num_heads, size)

        return of_heads(self.k_weight[...]), of_heads(self.v_weight[...])

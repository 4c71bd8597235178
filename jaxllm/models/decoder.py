"""The dense decoder that Llama and its relatives share, described by an `Architecture`.

Submodules bear vLLM's names (`model.layers[i].self_attn.qkv_proj`), which are those of checkpoints
but for the fused projections. The runner merges the module with its weights inside the jitted
step and calls it there; nothing here is jitted on its own account but the decoder layer.
"""

from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.attention import Attention, AttentionConfig, AttentionContext
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import RMSNorm
from jaxllm.layers.rope import Rotary, rotary
from jaxllm.models.architecture import Architecture
from jaxllm.models.checkpoint_names import DECODER_NAMES, CheckpointNames
from jaxllm.models.part import ModelPart
from jaxllm.parallel.sharding import Part


class DecoderForCausalLM(nnx.Module):
    """A decoder with a language model head.

    This is what the runner, the loader and the plan want of a model class, registered ones too.
    """

    checkpoint_names: ClassVar[CheckpointNames] = DECODER_NAMES

    def __init__(self, architecture: Architecture, *, num_shards: int = 1, dtype: DTypeLike):
        self.model = Decoder(architecture, num_shards=num_shards, dtype=dtype)
        # Tied: the embedding serves as the head, so that there is one array and one leaf.
        self.lm_head = (
            None
            if architecture.tie_word_embeddings
            else _embedding(architecture, num_shards, dtype)
        )

    @classmethod
    def abstract(
        cls,
        architecture: Architecture,
        dtype: DTypeLike,
        num_shards: int = 1,
        part: ModelPart | None = None,
    ) -> Self:
        """The model with shapes in place of weights, to be cut over so many devices; or a part of
        it, whose parameters have the names that they have in the whole."""
        model = nnx.eval_shape(lambda: cls(architecture, num_shards=num_shards, dtype=dtype))
        if part is not None:
            model._keep(part)
        return model

    @property
    def attention_configs(self) -> tuple[AttentionConfig, ...]:
        """What each layer's attention is on one shard, and so its cache."""
        return tuple(layer.self_attn.config for layer in self.model.own_layers)

    def __call__(
        self,
        inputs: jax.Array,
        positions: jax.Array,
        caches: tuple[jax.Array, ...],
        context: AttentionContext,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Run a step's tokens [T] at positions [T] (in their sequences). The ids of padding are
        beyond every vocabulary.

        Returns the hidden states [T, D] after the final norm, and the layers' caches, updated. A
        part of a model takes the hidden states of the part before in place of token ids, and
        leaves those for the part after.
        """
        return self.model(inputs, positions, caches, context)

    @property
    def num_logits(self) -> int:
        """The width of the logits: the vocabulary and, in a model that is cut, padding."""
        return self._head.weight.shape[0]

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states [n, D] to float32 logits [n, V]."""
        return self._head.logits(hidden)

    @property
    def _head(self) -> Embedding:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None, "this part of the model makes no logits"
        return head

    def _keep(self, part: ModelPart) -> None:
        """Drop what other parts have. A tied embedding is in the first part and in the last."""
        is_tied = self.lm_head is None
        self.model.keep(part, is_head=is_tied and part.has_head)
        if not part.has_head:
            self.lm_head = None


class Decoder(nnx.Module):
    """Embedding, layers, final norm; in a part of a model, None where other parts have them."""

    def __init__(self, architecture: Architecture, *, num_shards: int, dtype: DTypeLike):
        self.rope = architecture.rope
        self.embeds = True
        self.embed_tokens: Embedding | None = _embedding(architecture, num_shards, dtype)
        self.layers: nnx.List[DecoderLayer | None] = nnx.List(
            DecoderLayer(architecture, window=window, num_shards=num_shards, dtype=dtype)
            for window in architecture.layer_windows
        )
        self.norm: RMSNorm | None = RMSNorm(
            architecture.hidden_size, eps=architecture.rms_norm_eps, dtype=dtype
        )

    @property
    def own_layers(self) -> list["DecoderLayer"]:
        """Those that this part of the model has; their indices in the whole stay theirs."""
        return [layer for layer in self.layers if layer is not None]

    def keep(self, part: ModelPart, *, is_head: bool) -> None:
        """Drop what other parts have; the embedding stays where it is also the head."""
        self.embeds = part.embeds
        for index in range(len(self.layers)):
            if index not in part.layers:
                self.layers[index] = None
        if not (part.embeds or is_head):
            self.embed_tokens = None
        if not part.has_head:
            self.norm = None

    def __call__(
        self,
        inputs: jax.Array,
        positions: jax.Array,
        caches: tuple[jax.Array, ...],
        context: AttentionContext,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        hidden = inputs
        if self.embeds:
            assert self.embed_tokens is not None
            hidden = self.embed_tokens(inputs)
        rotations = rotary(self.rope, positions)
        new_caches = []
        for layer, cache in zip(self.own_layers, caches, strict=True):
            graphdef, weights = nnx.split(layer)
            hidden, cache = _run_layer(graphdef, weights, hidden, rotations, cache, context)
            new_caches.append(cache)
        return hidden if self.norm is None else self.norm(hidden), tuple(new_caches)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        window: int | None,
        num_shards: int,
        dtype: DTypeLike,
    ):
        hidden_size, eps = architecture.hidden_size, architecture.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden_size, eps=eps, dtype=dtype)
        self.self_attn = Attention(
            AttentionConfig(
                num_heads=architecture.num_heads,
                num_kv_heads=architecture.num_kv_heads,
                head_size=architecture.head_size,
                scale=architecture.head_size**-0.5,
                sliding_window=window,
            ),
            hidden_size=hidden_size,
            num_shards=num_shards,
            qkv_bias=architecture.qkv_bias,
            o_bias=architecture.o_bias,
            qk_norm_eps=eps if architecture.qk_norm else None,
            dtype=dtype,
        )
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(
            hidden_size,
            architecture.intermediate_size,
            bias=architecture.mlp_bias,
            num_shards=num_shards,
            dtype=dtype,
        )

    def __call__(
        self, hidden: jax.Array, rotations: Rotary, cache: jax.Array, context: AttentionContext
    ) -> tuple[jax.Array, jax.Array]:
        attended, cache = self.self_attn(self.input_layernorm(hidden), rotations, cache, context)
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), cache


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one matmul."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        num_shards: int,
        dtype: DTypeLike,
    ):
        self.num_shards = num_shards
        self.gate_up_proj = Linear(
            hidden_size,
            2 * intermediate_size,
            bias=bias,
            axes=("mlp", "hidden"),
            parts=(Part(intermediate_size), Part(intermediate_size)),
            dtype=dtype,
        )
        self.down_proj = Linear(
            intermediate_size, hidden_size, bias=bias, axes=("hidden", "mlp"), dtype=dtype
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("mlp"):
            shards = self.gate_up_proj(x).reshape(len(x), self.num_shards, -1)
            gate, up = jnp.split(shards, 2, axis=-1)
            product = (jax.nn.silu(gate.astype(jnp.float32)) * up).astype(x.dtype)
            return self.down_proj(product.reshape(len(x), -1))


def _embedding(architecture: Architecture, num_shards: int, dtype: DTypeLike) -> Embedding:
    return Embedding(
        architecture.vocab_size, architecture.hidden_size, num_shards=num_shards, dtype=dtype
    )


def _layer(
    graphdef: Any,
    weights: nnx.State,
    hidden: jax.Array,
    rotations: Rotary,
    cache: jax.Array,
    context: AttentionContext,
) -> tuple[jax.Array, jax.Array]:
    layer: DecoderLayer = nnx.merge(graphdef, weights)
    return layer(hidden, rotations, cache, context)


# Jitted although the step around it is, too: layers of equal structure (graphdef) are then traced
# and lowered once, however many there are. XLA inlines the calls.
_run_layer = jax.jit(_layer, static_argnums=0)

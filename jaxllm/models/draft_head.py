"""Heads that draft: a layer that goes on from what the model has made of a text.

A head reads, for each token of a text, the model's hidden state there and the token that follows.
From both it guesses the token after the following one. `DraftHead` is what the runner, the plan and
the loader need; its subclasses are the heads that checkpoints have. Embeddings, and mostly the
output head, are the model's.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.attention import Attention, AttentionSpec
from jaxllm.layers.context import MixerConfig, StepContext
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import Norm, NormSpec
from jaxllm.layers.residual import Stream, settle
from jaxllm.models.blocks import Block
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.specs import Caches, LayerSpec

Logits = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """What is static about a head."""

    kind: "type[DraftHead]"
    hidden_size: int
    layer: LayerSpec
    norm: NormSpec  # before the output head, and of what the head reads
    # The layers before which the model's residual stream is read; none: the head reads the hidden
    # states after the final norm.
    taps: tuple[int, ...] = ()
    # Whether the head goes on from its own hidden states after the norm, not before.
    passes_normed: bool = False
    # Whether the layer's attention is added to its normed input, not to the input itself.
    adds_to_normed: bool = False
    has_bias: bool = False  # of the projection of both inputs
    # Of a head with an output head of its own, which knows the first tokens of a list.
    num_drafted_tokens: int = 0
    maps_tokens: bool = False  # whether there is such a list; otherwise they are the same
    vocab_size: int = 0
    names: CheckpointMap = field(repr=False, compare=False)

    def check(self, num_shards: int) -> None:
        """Raise ValidationError if the layer cannot be cut into so many equal shards."""
        self.layer.check(num_shards)

    def abstract(self, dtype: DTypeLike, num_shards: int) -> "DraftHead":
        """Make the head, with shapes in place of weights."""
        return nnx.eval_shape(lambda: self.kind(self, num_shards=num_shards, dtype=dtype))


class DraftHead(nnx.Module):
    """A head: one layer, with a cache for each of its mixers."""

    layer: Any

    def __init__(self, spec: HeadSpec, *, num_shards: int, dtype: DTypeLike):
        self.spec = spec

    @property
    def attention_configs(self) -> tuple[MixerConfig, ...]:
        return tuple(getattr(self.layer, mixer.name).config for mixer in self.spec.layer.mixers)

    @property
    def checkpoint_map(self) -> CheckpointMap:
        return self.spec.names

    def enter(self, hidden: jax.Array, tapped: tuple[jax.Array, ...]) -> jax.Array:
        """What the head keeps of a model's hidden states [T, D], or of its stream at the taps."""
        return hidden

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        """Read hidden states [T, D], from `enter` or from the head itself, with the embeddings of
        the following tokens [T, D]. Return the head's own hidden states, and its caches."""
        raise NotImplementedError

    def compute_logits(self, hidden: jax.Array, of_model: Logits) -> jax.Array:
        """Logits [n, V] of the token after the following one. `of_model` is the model's head."""
        return of_model(hidden)


class MTPHead(DraftHead):
    """A layer for the prediction of several tokens, as checkpoints have it behind the decoder."""

    def __init__(self, spec: HeadSpec, *, num_shards: int, dtype: DTypeLike):
        super().__init__(spec, num_shards=num_shards, dtype=dtype)
        size = spec.hidden_size
        self.enorm: Norm = spec.norm.make(size, dtype=dtype)
        self.hnorm: Norm = spec.norm.make(size, dtype=dtype)
        self.eh_proj = Linear(2 * size, size, bias=spec.has_bias, dtype=dtype)
        self.layer = spec.layer.block(spec.layer, size, num_shards=num_shards, dtype=dtype)
        self.norm: Norm = spec.norm.make(size, dtype=dtype)

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        both = jnp.concatenate([self.enorm(embedded), self.hnorm(hidden)], axis=1)
        stream, caches = self.layer(self.eh_proj(both), caches, context)
        hidden = settle(stream)
        return self.norm(hidden) if self.spec.passes_normed else hidden, caches

    def compute_logits(self, hidden: jax.Array, of_model: Logits) -> jax.Array:
        return of_model(hidden if self.spec.passes_normed else self.norm(hidden))


class EagleHead(DraftHead):
    """EAGLE: a layer of the model's kind that continues its last hidden states."""

    def __init__(self, spec: HeadSpec, *, num_shards: int, dtype: DTypeLike):
        super().__init__(spec, num_shards=num_shards, dtype=dtype)
        size = spec.hidden_size
        self.fc = Linear(2 * size, size, bias=spec.has_bias, dtype=dtype)
        self.layer = spec.layer.block(spec.layer, size, num_shards=num_shards, dtype=dtype)

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        both = jnp.concatenate([embedded, hidden], axis=1)
        stream, caches = self.layer(self.fc(both), caches, context)
        return settle(stream), caches


class HalfNormedBlock(Block):
    """Llama's layer without the norm before its attention."""

    norms = ("post_attention_layernorm",)

    def __call__(
        self, hidden: Stream, caches: Caches, context: StepContext
    ) -> tuple[Stream, Caches]:
        hidden = settle(hidden)
        mixed, caches = self.mix(hidden, caches, context)
        hidden = self.add(hidden, mixed)
        return self.add(hidden, self.feed(self.norm(self.norms[0])(hidden), context)), caches


class Eagle3Head(DraftHead):
    """EAGLE-3: a layer that sees the model's stream in three depths, with a head of its own."""

    def __init__(self, spec: HeadSpec, *, num_shards: int, dtype: DTypeLike):
        super().__init__(spec, num_shards=num_shards, dtype=dtype)
        size = spec.hidden_size
        self.fc = Linear(len(spec.taps) * size, size, bias=spec.has_bias, dtype=dtype)
        self.layer = WideLayer(spec, num_shards=num_shards, dtype=dtype)
        self.norm: Norm = spec.norm.make(size, dtype=dtype)
        self.lm_head = Embedding(
            spec.num_drafted_tokens, size, looks_up=False, num_shards=num_shards, dtype=dtype
        )
        self.token_map = TokenMap(spec.num_drafted_tokens) if spec.maps_tokens else None

    def enter(self, hidden: jax.Array, tapped: tuple[jax.Array, ...]) -> jax.Array:
        return self.fc(jnp.concatenate(tapped, axis=1))

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        return self.layer(embedded, hidden, caches, context)

    def compute_logits(self, hidden: jax.Array, of_model: Logits) -> jax.Array:
        logits = self.lm_head.logits(self.norm(hidden))[:, : self.spec.num_drafted_tokens]
        if self.token_map is None:
            return logits
        return self.token_map(logits, self.spec.vocab_size)


class WideLayer(nnx.Module):
    """A layer whose attention sees embeddings and hidden states side by side, normed apart."""

    def __init__(self, spec: HeadSpec, *, num_shards: int, dtype: DTypeLike):
        size, layer = spec.hidden_size, spec.layer
        (attention,), (ffn,) = layer.mixers, layer.ffns
        assert isinstance(attention, AttentionSpec), attention
        self.input_layernorm: Norm = layer.norm.make(size, dtype=dtype)
        self.hidden_norm: Norm = layer.norm.make(size, dtype=dtype)
        self.post_attention_layernorm: Norm = layer.norm.make(size, dtype=dtype)
        self.self_attn = Attention(
            attention, size, input_size=2 * size, num_shards=num_shards, dtype=dtype
        )
        self.mlp = ffn.make(size, num_shards=num_shards, dtype=dtype)
        self.adds_to_normed = spec.adds_to_normed

    def __call__(
        self, embedded: jax.Array, hidden: jax.Array, caches: Caches, context: StepContext
    ) -> tuple[jax.Array, Caches]:
        (cache,), normed = caches, self.hidden_norm(hidden)
        both = jnp.concatenate([self.input_layernorm(embedded), normed], axis=1)
        mixed, cache = self.self_attn(both, cache, context)
        hidden = (normed if self.adds_to_normed else hidden) + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden), context), (cache,)


class TokenMap(nnx.Module):
    """Which tokens of the vocabulary a head's columns are: column i is token i + offsets[i]."""

    def __init__(self, size: int):
        self.offsets = nnx.Param(jnp.zeros(size, jnp.int32), axes=(None,))

    def __call__(self, logits: jax.Array, vocab_size: int) -> jax.Array:
        """Spread logits over the vocabulary; the tokens that the head does not know get -inf."""
        tokens = jnp.arange(logits.shape[1]) + self.offsets[...]
        spread = jnp.full((len(logits), vocab_size), -jnp.inf, logits.dtype)
        return spread.at[:, tokens].set(logits, mode="drop")

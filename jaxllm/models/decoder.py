"""The decoder of every family: embedding, the layers that an `Architecture` lists, norm, head.

Submodules have vLLM's names (`model.layers[i].self_attn.qkv_proj`): those of checkpoints, except
for fused projections. The runner merges the module with its weights inside the jitted step and
calls it there. Only the layer is jitted here.
"""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.context import Cache, LentCache, MixerConfig, StepContext
from jaxllm.layers.embedding import NOWHERE, Embedding, Positions
from jaxllm.layers.norm import Norm
from jaxllm.layers.per_layer_input import PerLayerInputs
from jaxllm.layers.residual import Stream, normalise, settle
from jaxllm.layers.rope import rotary
from jaxllm.layers.state import StateConfig
from jaxllm.models.checkpoint_map import CheckpointMap
from jaxllm.models.part import ModelPart
from jaxllm.models.pooling_head import PoolingHead
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.specs import Architecture, Caches, Layer, MixerSpec
from jaxllm.quantization.kv_cache import UNUSED_SCALES
from jaxllm.quantization.store import store_codes, with_codes


class DecoderForCausalLM(nnx.Module):
    """A decoder with a language model head, or with what pooling needs in its place; implements
    `jaxllm.models.base.PoolingModel`."""

    def __init__(self, architecture: Architecture, *, num_shards: int = 1, dtype: DTypeLike):
        self.architecture = architecture
        self.model = Decoder(architecture, num_shards=num_shards, dtype=dtype)
        head = architecture.pooling_head
        self.pooling_head: PoolingHead | None = (
            None if head is None else head.make(architecture.hidden_size, dtype=dtype)
        )
        self.cuts_tower = architecture.cuts_tower(num_shards)
        self.tower = _tower(architecture, num_shards if self.cuts_tower else 1, dtype)
        # A tied embedding serves as the head, so that there is one array and one leaf.
        self.lm_head = (
            None
            if architecture.tie_word_embeddings or not self._makes_logits
            else _embedding(
                architecture,
                num_shards,
                dtype,
                bias=architecture.has_head_bias,
                # A pooling head reads the rows of a few tokens.
                looks_up=head is not None,
            )
        )

    @classmethod
    def abstract(
        cls,
        architecture: Architecture,
        dtype: DTypeLike,
        num_shards: int = 1,
        part: ModelPart | None = None,
    ) -> Self:
        model = nnx.eval_shape(lambda: cls(architecture, num_shards=num_shards, dtype=dtype))
        if architecture.scheme is not None:
            names = model.checkpoint_map
            store_codes(model, architecture.scheme, names, num_shards=num_shards)
        if part is not None:
            model._keep(part)
        return model

    @property
    def attention_configs(self) -> tuple[MixerConfig, ...]:
        return tuple(module.config for module in self.cached_mixers.values())

    @property
    def state_configs(self) -> tuple[StateConfig, ...]:
        configs = (module.config for module in self._own_mixers().values())
        return tuple(config for config in configs if isinstance(config, StateConfig))

    @property
    def cached_mixers(self) -> dict[str, Any]:
        """The mixers with pages of their own, by their names, in the order of the caches."""
        return {
            name: module
            for name, module in self._own_mixers().items()
            if not isinstance(module.config, StateConfig)
        }

    def _own_mixers(self) -> dict[str, Any]:
        """The mixers by their names, except those that use the caches of another layer."""
        return {
            f"model.layers.{index}.{mixer.name}": getattr(layer, mixer.name)
            for index, layer in self.model.own_layers.items()
            if layer.spec.caches_of is None
            for mixer in layer.spec.mixers
        }

    @property
    def checkpoint_map(self) -> CheckpointMap:
        names = ModelRegistry.family(self.architecture.name).checkpoint(self.architecture)
        if self.architecture.pooling_head is not None:
            names = self.architecture.pooling_head.names(names)
        return with_codes(names, self.architecture.scheme).ignoring(UNUSED_SCALES)

    def __call__(
        self,
        inputs: jax.Array,
        positions: jax.Array,
        caches: tuple[Cache, ...],
        context: StepContext,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        hidden, _, caches = self.model(inputs, positions, caches, context)
        return hidden, caches

    def tapped(
        self,
        inputs: jax.Array,
        positions: jax.Array,
        caches: tuple[Cache, ...],
        context: StepContext,
        taps: tuple[int, ...],
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[Cache, ...]]:
        """Run the whole model. Return the hidden states, the residual streams [T, D] before the
        layers `taps`, of which one may be behind the last layer, and the caches."""
        return self.model(inputs, positions, caches, context, taps)

    @property
    def num_logits(self) -> int:
        return self._head.weight.shape[0] if self._makes_logits else 0

    def compute_logits(self, hidden: jax.Array) -> jax.Array:
        return self._capped(self._head.logits(hidden))

    def _capped(self, logits: jax.Array) -> jax.Array:
        scale, soft_cap = self.architecture.logits_scale, self.architecture.logits_soft_cap
        if scale != 1.0:
            logits = logits * scale
        if soft_cap is None:
            return logits
        # Columns of padding stay -inf.
        capped = soft_cap * jnp.tanh(logits / soft_cap)
        return jnp.where(jnp.isneginf(logits), logits, capped)

    def project(self, pooled: jax.Array) -> jax.Array:
        assert self.pooling_head is not None, "the model generates"
        found = self.pooling_head(pooled, self._head if self._makes_logits else None)
        return self._capped(found) if self.pooling_head.spec.logits else found

    @property
    def _makes_logits(self) -> bool:
        head = self.architecture.pooling_head
        return head is None or head.reads_logits

    @property
    def _head(self) -> Embedding:
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None, "this part of the model makes no logits"
        return head

    def _keep(self, part: ModelPart) -> None:
        """Drop the modules of other parts. The first and the last part have a tied embedding."""
        is_head = self.lm_head is None and self._makes_logits
        self.model.keep(part, is_head=is_head and part.has_head)
        if not part.has_head:
            self.lm_head = self.pooling_head = None


class Decoder(nnx.Module):
    """Embedding, layers, final norm. In a part of a model, modules of other parts are None."""

    def __init__(self, architecture: Architecture, *, num_shards: int, dtype: DTypeLike):
        size = architecture.hidden_size
        self.embeds = True
        self.embedding_scale = architecture.embedding_scale
        self.embed_tokens: Embedding | None = _embedding(architecture, num_shards, dtype)
        self.embed_positions: Positions | None = (
            None
            if architecture.num_positions is None
            else Positions(architecture.num_positions, size, dtype=dtype)
        )
        self.first_position = architecture.first_position
        num_types = architecture.num_token_types
        self.embed_types: Positions | None = (
            None if num_types == 0 else Positions(num_types, size, dtype=dtype)
        )
        embedding_norm = architecture.embedding_norm
        self.embed_norm: Norm | None = (
            None if embedding_norm is None else embedding_norm.make(size, dtype=dtype)
        )
        per_layer_input = architecture.per_layer_input
        self.per_layer_inputs: PerLayerInputs | None = (
            None
            if per_layer_input is None
            else PerLayerInputs(
                per_layer_input,
                size,
                architecture.num_layers,
                num_shards=num_shards,
                dtype=dtype,
            )
        )
        self.layers: nnx.List[Layer | None] = nnx.List(
            spec.block(spec, size, num_shards=num_shards, dtype=dtype)
            for spec in architecture.layers
        )
        final_norm = architecture.final_norm
        self.norm: Norm | None = None if final_norm is None else final_norm.make(size, dtype=dtype)

    @property
    def own_layers(self) -> dict[int, Layer]:
        """The layers of this part of the model, by their indices in the whole model."""
        return {index: layer for index, layer in enumerate(self.layers) if layer is not None}

    def keep(self, part: ModelPart, *, is_head: bool) -> None:
        """Drop the modules of other parts; keep an embedding that is also the head."""
        self.embeds = part.embeds
        if not part.embeds:
            self.embed_positions = self.embed_types = self.per_layer_inputs = None
            self.embed_norm = None
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
        caches: tuple[Cache, ...],
        context: StepContext,
        taps: tuple[int, ...] = (),
    ) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[Cache, ...]]:
        """Return the hidden states, the streams before the layers `taps`, and the caches."""
        hidden: Any = inputs
        if self.embeds:
            inputs, hidden = self._enter(inputs, positions, context)
        of_layers = None if self.per_layer_inputs is None else self.per_layer_inputs(inputs, hidden)
        # Most models have one rope for all layers; its angles are computed once.
        ropes = dict.fromkeys(layer.spec.rope for layer in self.own_layers.values())
        places = positions if context.rope_positions is None else context.rope_positions
        rotations = {rope: rope and rotary(rope, places) for rope in ropes}
        context = dataclasses.replace(context, positions=positions)
        pages, states = (iter([c for c in caches if _is_state(c) == its]) for its in (False, True))
        held, tapped = dict[int, Caches](), dict[int, jax.Array]()
        for index, layer in self.own_layers.items():
            # A layer may go on with the caches of an earlier one (see `LentCache`).
            owner = index if layer.spec.caches_of is None else layer.spec.caches_of
            if owner == index:
                held[owner] = tuple(
                    next(states if isinstance(_config(layer, mixer), StateConfig) else pages)
                    for mixer in layer.spec.mixers
                )
            context = dataclasses.replace(
                context,
                rotary=rotations[layer.spec.rope],
                layer_input=None if of_layers is None else of_layers[:, index],
                layer=None if context.expert_tokens is None else jnp.int32(index),
            )
            if index in taps:
                tapped[index] = settle(hidden)
            if not layer.leaves_sums:
                hidden = settle(hidden)
            graphdef, weights = nnx.split(layer)
            hidden, held[owner] = _run_layer(graphdef, weights, hidden, held[owner], context)
            given = context.given
            if given is not None and given.adds_behind(index, settle(hidden).shape[-1]):
                hidden = given.add_behind(index, settle(hidden))
        updated = tuple(
            cache.pages if isinstance(cache, LentCache) else cache
            for of_layer in held.values()
            for cache in of_layer
        )
        updated = tuple(sorted(updated, key=_is_state))  # pages come first
        assert len(updated) == len(caches), f"{len(caches)} caches for {len(updated)} mixers"
        tapped[len(self.layers)] = settle(hidden)
        streams = tuple(tapped[index] for index in taps)
        if self.norm is None:
            return settle(hidden), streams, updated
        return normalise(hidden, self.norm, context)[1], streams, updated

    def _enter(
        self, inputs: jax.Array, positions: jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        """The ids of tokens without their types, and all that is known of the tokens [T, D]."""
        assert self.embed_tokens is not None
        size, types = self.embed_tokens.vocab_size, None
        if self.embed_types is not None:
            is_real = inputs < size * len(self.embed_types.weight[...])
            types = jnp.where(is_real, inputs // size, NOWHERE)
            inputs = jnp.where(is_real, inputs % size, inputs)
        given = context.given
        if self.per_layer_inputs is not None and given is not None:
            inputs = jnp.where(given.rows >= 0, self.per_layer_inputs.spec.of_given, inputs)
        hidden = self.embed(inputs)
        if given is not None:
            hidden = given.put_into(hidden)
        if self.embed_positions is not None:
            rows = jnp.where(inputs < size, positions + self.first_position, NOWHERE)
            hidden = hidden + self.embed_positions(rows)
        if self.embed_types is not None and types is not None:
            hidden = hidden + self.embed_types(types)
        return inputs, hidden if self.embed_norm is None else self.embed_norm(hidden)

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """The embeddings [T, D] of tokens; zeros for padding."""
        assert self.embed_tokens is not None, "this part of the model has no embeddings"
        embedded = self.embed_tokens(token_ids)
        if self.embedding_scale != 1.0:
            embedded = embedded * jnp.asarray(self.embedding_scale, embedded.dtype)
        return embedded


def _config(layer: Layer, mixer: MixerSpec) -> MixerConfig | StateConfig:
    """What a mixer of a layer keeps."""
    return getattr(layer, mixer.name).config


def _is_state(cache: Cache) -> bool:
    return isinstance(cache, tuple) and not isinstance(cache, LentCache)


def _embedding(
    architecture: Architecture,
    num_shards: int,
    dtype: DTypeLike,
    *,
    bias: bool = False,
    looks_up: bool = True,
) -> Embedding:
    return Embedding(
        architecture.vocab_size,
        architecture.hidden_size,
        bias=bias,
        looks_up=looks_up,
        num_shards=num_shards,
        dtype=dtype,
    )


def _tower(architecture: Architecture, num_shards: int, dtype: DTypeLike) -> Any:
    if architecture.tower is None:
        return None
    tower = architecture.tower.make(architecture.hidden_size, num_shards=num_shards, dtype=dtype)
    if num_shards == 1:  # also where the decoder is cut, and the tower cannot be
        for _, parameter in nnx.iter_graph(tower):
            if isinstance(parameter, nnx.Param):
                parameter.set_metadata(axes=())
    return tower


def _layer(
    graphdef: Any, weights: nnx.State, hidden: Stream, caches: Caches, context: StepContext
) -> tuple[Stream, Caches]:
    layer: Layer = nnx.merge(graphdef, weights)
    return layer(hidden, caches, context)


# The step around the layer is jitted already. This jit makes JAX trace and lower layers of equal
# structure (graphdef) only once. XLA inlines the calls.
_run_layer = jax.jit(_layer, static_argnums=0)

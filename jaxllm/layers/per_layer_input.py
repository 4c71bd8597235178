"""Inputs that each layer of a model has for itself: for every token, a small vector per layer.

A second embedding has a row of all these vectors for each token id. A projection of the first
hidden state is added to it. Each layer gates its vector by the residual stream, and projects it
back. The inputs do not depend on the layers, so they are computed once per step.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.activation import ACTIVATIONS
from jaxllm.layers.context import StepContext
from jaxllm.layers.embedding import Embedding
from jaxllm.layers.linear import Linear
from jaxllm.layers.norm import NormSpec


@dataclass(frozen=True, kw_only=True)
class PerLayerInputSpec:
    """The static part of the inputs of a model's layers."""

    size: int  # of a layer's input for a token: P
    vocab_size: int  # of the second embedding
    norm: NormSpec
    activation: str  # of the gate, one of ACTIVATIONS
    of_given: int = 0  # the token whose inputs stand where an embedding is given

    def make(self, hidden_size: int, *, dtype: DTypeLike) -> "GatedInput":
        """Make a layer's part."""
        return GatedInput(self, hidden_size, dtype=dtype)


class PerLayerInputs(nnx.Module):
    """Makes the inputs of all layers: (norm(projection(hidden)) + embedding(ids)) / sqrt(2)."""

    def __init__(
        self,
        spec: PerLayerInputSpec,
        hidden_size: int,
        num_layers: int,
        *,
        num_shards: int,
        dtype: DTypeLike,
    ):
        self.spec = spec
        size = num_layers * spec.size
        self.embed_tokens_per_layer = Embedding(
            spec.vocab_size, size, num_shards=num_shards, dtype=dtype
        )
        self.per_layer_model_projection = Linear(hidden_size, size, bias=False, dtype=dtype)
        self.per_layer_projection_norm = spec.norm.make(spec.size, dtype=dtype)

    def __call__(self, token_ids: jax.Array, hidden: jax.Array) -> jax.Array:
        """Return [T, layers, P] for token ids [T] and their embeddings [T, D]."""
        with jax.named_scope("per_layer_inputs"):
            shape = (len(token_ids), -1, self.spec.size)
            projected = self.per_layer_model_projection(hidden) * hidden.shape[-1] ** -0.5
            projected = self.per_layer_projection_norm(projected.reshape(shape))
            looked_up = self.embed_tokens_per_layer(token_ids).reshape(shape)
            # The scale is rounded to the table's dtype, as the models were trained.
            looked_up = looked_up * jnp.asarray(self.spec.size**0.5, looked_up.dtype)
            return (projected + looked_up) * 2**-0.5


class GatedInput(nnx.Module):
    """norm(projection(activation(gate(hidden)) * input)): what a layer makes of its input."""

    def __init__(self, spec: PerLayerInputSpec, hidden_size: int, *, dtype: DTypeLike):
        self.activation = spec.activation
        self.per_layer_input_gate = Linear(hidden_size, spec.size, bias=False, dtype=dtype)
        self.per_layer_projection = Linear(spec.size, hidden_size, bias=False, dtype=dtype)
        self.post_per_layer_input_norm = spec.norm.make(hidden_size, dtype=dtype)

    def __call__(self, hidden: jax.Array, context: StepContext) -> jax.Array:
        """Return [T, D], to be added to the residual stream [T, D]."""
        assert context.layer_input is not None
        with jax.named_scope("per_layer_input"):
            gate = ACTIVATIONS[self.activation](
                self.per_layer_input_gate(hidden).astype(jnp.float32)
            )
            gated = (gate * context.layer_input).astype(hidden.dtype)
            return self.post_per_layer_input_norm(self.per_layer_projection(gated))

"""Computes logits of whole rows of tokens with the class of the served model.

In serving, attention reads a paged cache. Here every row is a whole sequence, so the batch has all
of its keys and values. `CausalRows` is an attention backend that needs no cache and is
differentiable.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig, RaggedBatch

from jaxllm.cache_groups import window_of
from jaxllm.errors import UnsupportedModelError
from jaxllm.layers.attention import AttentionSpec
from jaxllm.layers.context import PagedBatch, StepContext
from jaxllm.layers.latent_attention import LatentAttentionSpec
from jaxllm.layers.moe import MoESpec
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.specs import Architecture
from jaxllm.weights.loader import load_weights, parameters_of, sources_of

_QUERY_BLOCK = 256  # tokens
_WRITES = ("o_proj", "down_proj")  # modules that add to the residual stream


@dataclass(frozen=True, kw_only=True)
class CausalRows:
    """Causal attention within each row of a flat batch of equally long rows.

    It has only those methods of an attention backend that a model calls.
    """

    row_length: int

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: Any,
        batch: Any,
        prepared: Any,
        *,
        config: AttentionConfig,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Map q [T, N, H], k and v [T, K, H] to [T, N, H]; return the cache unchanged."""
        assert sinks is None, "`RowModel` refuses them"
        length = self.row_length
        group = config.num_heads // config.num_kv_heads
        # Put heads before tokens, so that the products are plain matrix products.
        q = q.reshape(-1, length, config.num_kv_heads, group, q.shape[-1]).transpose(0, 2, 3, 1, 4)
        k, v = (
            x.reshape(-1, length, config.num_kv_heads, x.shape[-1]).transpose(0, 2, 1, 3)
            for x in (k, v)
        )
        visible = _visible(length, config)
        blocks = []
        # Work in blocks, because products with later tokens would be masked anyway.
        for first in range(0, length, _QUERY_BLOCK):
            end = min(first + _QUERY_BLOCK, length)
            scores = config.scale * jnp.einsum(
                "bkgqh,bkth->bkgqt",
                q[:, :, :, first:end],
                k[:, :, :end],
                preferred_element_type=jnp.float32,
            )
            if config.soft_cap is not None:
                scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
            scores = jnp.where(visible[first:end, :end], scores, -jnp.inf)
            weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
            blocks.append(
                jnp.einsum(
                    "bkgqt,bkth->bkgqh",
                    weights,
                    v[:, :, :end],
                    preferred_element_type=jnp.float32,
                )
            )
        out = jnp.concatenate(blocks, axis=3)
        out = out.transpose(0, 3, 1, 2, 4).astype(v.dtype)
        return out.reshape(-1, config.num_heads, config.value_size), cache


def _visible(length: int, config: AttentionConfig) -> jax.Array:
    """Whether the row's token sees the column's token: [length, length]."""
    positions = jnp.arange(length)
    distance = positions[:, None] - positions
    visible = distance >= 0
    if config.sliding_window is not None:
        visible &= distance < config.sliding_window
    if config.chunk is not None:
        visible &= (positions // config.chunk)[:, None] == positions // config.chunk
    return visible


class RowModel:
    """A model without weights: maps weights by name and token ids [B, length] to logits."""

    def __init__(self, architecture: Architecture):
        _refuse_unsupported(architecture)
        model_class = ModelRegistry.resolve([architecture.name])
        self.architecture = architecture
        self.abstract = model_class.abstract(architecture, jnp.float32)
        self.parameters = parameters_of(self.abstract)
        self.sources = sources_of(self.parameters, self.abstract.checkpoint_map)
        self._graphdef, state = nnx.split(self.abstract)
        self._treedef = jax.tree.structure(state)

    def initial_weights(self, seed: int) -> dict[str, jax.Array]:
        """Small random matrices. Those that write to the residual stream are zero, so that layers
        add nothing at first."""
        rng = np.random.default_rng(seed)
        weights = {}
        for name, parameter in self.parameters.items():
            module = name.split(".")[-2]
            if len(parameter.shape) == 1:
                values = np.full(parameter.shape, 0.0 if name.endswith(".bias") else 1.0)
            elif module in _WRITES:
                values = np.zeros(parameter.shape)
            else:
                values = 0.02 * rng.standard_normal(parameter.shape)
            weights[name] = jnp.asarray(values, jnp.float32)
        return weights

    def load(self, model_dir: Path) -> dict[str, jax.Array]:
        """Load the weights of a model directory in float32."""
        leaves = jax.tree.leaves(load_weights(model_dir, self.abstract))
        return dict(zip(self.parameters, leaves, strict=True))

    def logits(
        self,
        weights: Mapping[str, jax.Array],
        token_ids: jax.Array,
        change: Callable[[Any], Any] = lambda model: model,
    ) -> jax.Array:
        """Compute float32 logits [B, length, V], by the module as `change` leaves it."""
        leaves = [weights[name] for name in self.parameters]
        model = change(nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, leaves)))
        num_rows, length = token_ids.shape
        # The fields of a paged batch, which `CausalRows` does not read.
        nothing = jnp.zeros(0, jnp.int32)
        batch = RaggedBatch(
            query_starts=nothing,
            context_lens=nothing,
            block_tables=nothing,
            num_decodes=nothing,
            block_size=1,
            decode_only=False,
        )
        backend: Any = CausalRows(row_length=length)
        windows = tuple(set(map(window_of, model.attention_configs)))
        paged = (PagedBatch(batch, prepared=None),) * len(windows)
        context = StepContext(windows=windows, paged=paged, backend=backend)
        positions = jnp.tile(jnp.arange(length), num_rows)
        caches = (nothing,) * len(model.attention_configs)
        hidden, _ = model(token_ids.reshape(-1), positions, caches, context)
        return model.compute_logits(hidden).reshape(num_rows, length, -1)


def _refuse_unsupported(architecture: Architecture) -> None:
    if architecture.scheme is not None:
        raise UnsupportedModelError(f"{architecture.name}: quantised models are not trained")
    for layer in architecture.layers:
        if any(isinstance(ffn, MoESpec) for ffn in layer.ffns):
            raise UnsupportedModelError(f"{architecture.name}: models with experts are not trained")
        if any(isinstance(its, LatentAttentionSpec) for its in layer.mixers):
            raise UnsupportedModelError(
                f"{architecture.name}: models with latent attention are not trained"
            )
        if any(not isinstance(its, AttentionSpec) for its in layer.mixers):
            raise UnsupportedModelError(
                f"{architecture.name}: models with recurrent layers are not trained"
            )
        if any(isinstance(its, AttentionSpec) and its.has_sinks for its in layer.mixers):
            raise UnsupportedModelError(
                f"{architecture.name}: models with attention sinks are not trained"
            )

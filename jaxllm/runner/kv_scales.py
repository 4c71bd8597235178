"""Calculates the scales of cached keys and values: at the start a model reads a made-up text, once.

The model runs as in a step, but over one row and with a backend that caches nothing: in place of a
cache each layer gets back the largest key and value of each of its kv heads.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxllm_kernels.common import cdiv
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig, KVScales, RaggedBatch
from jaxllm_kernels.ragged_paged_attention.xla import XlaBackend

from jaxllm.cache_groups import window_of
from jaxllm.layers.context import StepContext
from jaxllm.logging import init_logger
from jaxllm.models.base import Model
from jaxllm.models.specs import Architecture
from jaxllm.parallel.sharding import num_pieces, sharding
from jaxllm.plan.choose_kv_cache import KVCachePlan
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.quantization.kv_cache import LARGEST_CODE, KVCodes
from jaxllm.weights.loader import parameters_of

logger = init_logger(__name__)

_BLOCK_SIZE = 64
_NUM_TOKENS = 8 * _BLOCK_SIZE
# How much larger than those of the text other keys and values may be. It costs codes of fp8
# nothing, since their rounding is relative; those of int8 lose as much precision.
_ROOM: dict[KVCodes, float] = {"float8_e4m3fn": 2.0, "int8": 1.2}


@dataclass(frozen=True)
class _Watcher:
    """Attends to the keys and values of the step alone. Has those methods of an attention backend
    that a model calls."""

    attention: XlaBackend
    cache_head_axis: int = 0

    def prepare(
        self, batch: RaggedBatch, configs: tuple[AttentionConfig, ...], *, num_tokens: int
    ) -> Any:
        return self.attention.prepare(batch, configs, num_tokens=num_tokens)

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Any,
        *,
        config: AttentionConfig,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend; the cache becomes float32 [K, 2], the largest of |k| and |v|."""
        del cache, kv_scales
        plain = dataclasses.replace(config, kv_dtype=None)
        pages = self.attention.cache_shape(
            plain,
            num_blocks=batch.block_tables.shape[1],
            block_size=batch.block_size,
            dtype=k.dtype,
        )
        out, _ = self.attention.attend(
            q, k, v, jnp.zeros(pages.shape, pages.dtype), batch, prepared, config=plain, sinks=sinks
        )
        largest = (jnp.abs(x.astype(jnp.float32)).max(axis=(0, 2)) for x in (k, v))
        return out, jnp.stack(list(largest), axis=-1)


def with_calculated_scales(plan: EnginePlan, states: list[nnx.State]) -> list[nnx.State]:
    """The weights of each stage, and of a draft model behind them, with scales in their places."""
    states = list(states)
    if plan.kv_cache is not None and plan.kv_cache.is_calculated:
        hidden: Any = _made_up_text(plan, plan.architecture)
        for stage in plan.stages:
            if stage.index > 0:
                hidden = jax.device_put(hidden, sharding(stage.mesh))
            model, state = plan.abstract_model(stage), states[stage.index]
            hidden, scales = _read(plan, plan.kv_cache, model, state, hidden, stage.mesh)
            states[stage.index] = _placed(model, state, scales)
    draft = plan.draft_model
    if draft is not None and draft.kv_cache is not None and draft.kv_cache.is_calculated:
        model: Any = plan.abstract_draft()
        text = _made_up_text(plan, draft.architecture)
        _, scales = _read(plan, draft.kv_cache, model, states[-1], text, plan.stages[0].mesh)
        states[-1] = _placed(model, states[-1], scales)
    return states


def _made_up_text(plan: EnginePlan, architecture: Architecture) -> np.ndarray:
    num_tokens = min(_NUM_TOKENS, plan.max_model_len)
    logger.info("keys and values get the scales of those of %d made-up tokens", num_tokens)
    random = np.random.default_rng(0)
    return random.integers(architecture.vocab_size, size=num_tokens).astype(np.int32)


def _read(
    plan: EnginePlan,
    kv_cache: KVCachePlan,
    model: Any,
    state: nnx.State,
    entering: jax.Array | np.ndarray,
    mesh: Mesh,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Let a part of a model read; return what leaves it, and the scales of its mixers."""
    num_tokens, codes = len(entering), kv_cache.codes
    graphdef, abstract = nnx.split(model)
    configs = model.attention_configs
    names = [f"{name}.kv_scales" for name in model.cached_mixers]
    backend: Any = _Watcher(XlaBackend().tuned_for(plan.chip))
    num_shards = num_pieces(mesh, ("heads",))
    num_heads = [config.num_kv_heads * num_shards for config in configs]

    @functools.partial(jax.jit, compiler_options=dict(plan.compiler_options) or None)
    def read(
        leaves: list[jax.Array], entering: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        merged = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(abstract), leaves))
        batch = RaggedBatch(
            query_starts=jnp.array([0, num_tokens], jnp.int32),
            context_lens=jnp.array([num_tokens], jnp.int32),
            block_tables=jnp.arange(cdiv(num_tokens, _BLOCK_SIZE), dtype=jnp.int32)[None],
            num_decodes=jnp.int32(0),
            block_size=_BLOCK_SIZE,
            decode_only=False,
        )
        context = StepContext.prepare(
            dict.fromkeys(map(window_of, configs), batch),
            configs,
            num_tokens=num_tokens,
            backend=backend,
            mesh=mesh,
            add_norm=plan.add_norm,
            state_ops=plan.state_ops if model.state_configs else None,
            slots=jnp.zeros(1, jnp.int32),
            num_slots=1,
        )
        states = jax.tree.map(
            lambda array: jnp.zeros(array.shape, array.dtype),
            tuple(config.of_slots(1, mesh, plan.state_ops) for config in model.state_configs),
        )
        nothing = tuple(jnp.zeros((heads, 2), jnp.float32) for heads in num_heads)
        caches = (*nothing, *states)
        hidden, caches = merged(entering, jnp.arange(num_tokens), caches, context)
        largest = caches[: len(nothing)]
        unit = _ROOM[codes] / LARGEST_CODE[codes]
        return hidden, tuple(jnp.where(its > 0, its * unit, 1.0) for its in largest)

    hidden, scales = read(jax.tree.leaves(state), jnp.asarray(entering))
    return hidden, dict(zip(names, scales, strict=True))


def _placed(model: Model, state: nnx.State, scales: dict[str, jax.Array]) -> nnx.State:
    """The state with these scales where it has scales."""
    leaves, treedef = jax.tree.flatten(state)
    names = list(parameters_of(model))
    placed = [
        jax.device_put(scales[name], leaf.sharding) if name in scales else leaf
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, placed)

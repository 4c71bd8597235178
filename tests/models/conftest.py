"""Runs a model directory without an engine: one row, with blocks scattered over a small cache, on
one device or cut over several."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxllm_kernels.causal_conv.xla import XlaConv
from jaxllm_kernels.gated_delta.xla import XlaDelta
from jaxllm_kernels.mla.api import LatentConfig, get_latent_backend
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch, get_backend
from jaxllm_kernels.ragged_self_attention.xla import XlaSelfAttention
from jaxllm_kernels.recurrent.copies import XlaCopies
from jaxllm_kernels.ssd.xla import XlaSsd

from jaxllm.cache_config import CacheConfig
from jaxllm.cache_groups import window_of
from jaxllm.layers.attention import cache_axes
from jaxllm.layers.context import MixerConfig, StepContext
from jaxllm.layers.expanded_latents import ExpandedForm
from jaxllm.layers.state import StateConfig, StateOps
from jaxllm.models.architecture import read_architecture
from jaxllm.models.registry import ModelRegistry
from jaxllm.models.whole_experts import with_whole_experts
from jaxllm.parallel.sharding import make_mesh, num_pieces, sharding
from jaxllm.plan.choose_kv_cache import with_kv_cache
from jaxllm.plan.expand_latents import with_forms
from jaxllm.quantization.config_file import read_config
from jaxllm.quantization.products import Products
from jaxllm.weights.loader import load_weights

BLOCK_SIZE = 4
PADDING = 1  # a token like others
STATE_OPS = StateOps(
    conv=XlaConv(),
    delta=XlaDelta(),
    ssd=XlaSsd(),
    copies=XlaCopies(),
    self_attention=XlaSelfAttention(),
)


@dataclass(frozen=True)
class Program:
    """What a step of one row is made of. Equal models of several checkpoints share it."""

    graphdef: Any
    num_blocks: int
    backend: Any
    mesh: jax.sharding.Mesh

    def step(self, weights, token_ids, num_tokens, start, caches):
        """Compute the first num_tokens of token_ids, i32 [T], behind `start` others; a single
        token as a decode. The rest is padding. Returns logits [T, V], and the caches."""
        model = nnx.merge(self.graphdef, weights)
        batch = RaggedBatch(
            query_starts=jnp.stack([0, num_tokens]),
            context_lens=(start + num_tokens)[None],
            block_tables=jnp.arange(self.num_blocks)[None, ::-1],
            num_decodes=(num_tokens == 1).astype(jnp.int32),
            block_size=BLOCK_SIZE,
            decode_only=False,
        )
        configs = model.attention_configs
        context = StepContext.prepare(
            dict.fromkeys(map(window_of, configs), batch) or {None: batch},
            configs,
            num_tokens=len(token_ids),
            backend=self.backend,
            mesh=self.mesh,
            state_ops=STATE_OPS if model.state_configs else None,
            slots=jnp.array([1]),
            num_slots=2,
        )
        positions = start + jnp.arange(len(token_ids))
        hidden, caches = model(token_ids, positions, caches, context)
        return model.compute_logits(hidden), caches


@functools.lru_cache(maxsize=4)  # for tests that follow each other
def compiled(program: Program) -> Callable:
    return jax.jit(program.step)


class SingleRow:
    """A loaded model that computes one sequence in chunks."""

    def __init__(
        self,
        model_dir: Path,
        dtype: str = "float32",
        *,
        num_shards: int = 1,
        max_model_len: int | None = None,
        num_blocks: int = 16,
        quantization: str | None = None,
        cache: CacheConfig | None = None,
        spreads_experts: bool = False,
        products: Products | None = None,
    ):
        self.num_blocks = num_blocks
        config = read_config(model_dir)
        self.architecture = read_architecture(
            config, max_model_len=max_model_len, quantization=quantization
        )
        if spreads_experts:
            self.architecture = with_whole_experts(self.architecture)
        # Whole prompts are expanded; what goes on behind a chunk, and single tokens, are absorbed.
        expanded = ExpandedForm(op=XlaSelfAttention(), fewest_tokens=2)
        self.architecture = with_forms(self.architecture, lambda _: expanded)
        if products is not None:
            self.architecture = self.architecture.with_products(products)
        model_class = ModelRegistry.resolve([self.architecture.name])
        self.dtype = jnp.dtype(dtype)
        if cache is not None:
            self.architecture, _ = with_kv_cache(
                self.architecture,
                cache,
                model_dir,
                hf_config=config,
                dtype=self.dtype,
                reads_weights=True,
            )
        self.architecture.check(num_shards)
        self.abstract_model = model_class.abstract(self.architecture, self.dtype, num_shards)
        self.mesh = make_mesh(jax.devices()[:num_shards])
        self.weights = load_weights(model_dir, self.abstract_model, mesh=self.mesh)
        self._graphdef, _ = nnx.split(self.abstract_model)
        configs = self.abstract_model.attention_configs
        keeps_latents = any(isinstance(config, LatentConfig) for config in configs)
        get = get_latent_backend if keeps_latents else get_backend
        self._backend: Any = get("reference")

    @property
    def program(self) -> Program:
        return Program(self._graphdef, self.num_blocks, self._backend, self.mesh)

    def logits(
        self,
        token_ids: Sequence[int],
        chunks: Sequence[int] | None = None,
        *,
        width: int | None = None,
    ) -> np.ndarray:
        """Compute logits [T, V] of a sequence in chunks of these sizes; None: as a whole. One
        program computes all of the chunks that are padded to a width."""
        pages = map(self._cache, self.abstract_model.attention_configs)
        caches = (*pages, *map(self._states, self.abstract_model.state_configs))
        step, parts, start = compiled(self.program), [], 0
        for size in chunks or [len(token_ids)]:
            chunk = np.full(width or size, PADDING, np.int32)
            chunk[:size] = token_ids[start : start + size]
            logits, caches = step(self.weights, chunk, np.int32(size), np.int32(start), caches)
            parts.append(np.asarray(logits)[:size])
            start += size
        assert start == len(token_ids)
        return np.concatenate(parts)

    def _cache(self, config: MixerConfig) -> jax.Array:
        """The empty cache of a layer, with the heads of all shards."""
        shape = self._backend.cache_shape(
            config, num_blocks=self.num_blocks, block_size=BLOCK_SIZE, dtype=self.dtype
        )
        sizes = list(shape.shape)
        if (axis := self._backend.cache_head_axis) is not None:
            sizes[axis] *= num_pieces(self.mesh, ("heads",))
        place = sharding(self.mesh, cache_axes(self._backend))
        return jax.device_put(np.zeros(sizes, shape.dtype), place)

    def _states(self, config: StateConfig) -> tuple[jax.Array, ...]:
        """The states of a mixer, with garbage in both slots."""
        shapes = config.of_slots(2, self.mesh, STATE_OPS)
        return tuple(jax.device_put(np.full(s.shape, 77, s.dtype), s.sharding) for s in shapes)


def assert_same_model(one: SingleRow, other: SingleRow) -> None:
    """They compute the same: by equal programs, of equal weights."""
    assert one.program == other.program
    jax.tree.map(np.testing.assert_array_equal, one.weights, other.weights)


@pytest.fixture(scope="session")
def single_row():
    return SingleRow

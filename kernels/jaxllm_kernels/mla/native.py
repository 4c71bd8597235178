"""The implementation for CPUs in C++: one call of the library of native kernels per layer.

The cache is [blocks, tokens of a page, width]. The elements of a page are in the order of values,
which `ragged_paged_attention/native.h` describes. A page has room for whole vectors of tokens.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.common import round_up
from jaxllm_kernels.mla.api import LatentConfig, check_latent
from jaxllm_kernels.native.library import Library, NoLibrary
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import BatchLimits, RaggedBatch
from jaxllm_kernels.ragged_paged_attention.native import LANES, usable_library


@dataclass(frozen=True)
class NativeLatentBackend:
    """Latent attention by threads; each takes tiles of queries, or some of their heads."""

    # The registered backend has no library. The plan loads one and makes a backend with it.
    library: Library | NoLibrary = NoLibrary("nothing has loaded it")
    name: str = "native"

    @property
    def cache_head_axis(self) -> None:
        return None

    def tuned_for(self, chip: Chip) -> "NativeLatentBackend":
        del chip
        return self

    def check(
        self, config: LatentConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        check_latent(limits, dtype=dtype)
        library = usable_library(self.library, dtype=dtype, chip=chip)
        if config.latent_size % LANES:
            raise ValueError(
                f"latents of {config.latent_size} are not a multiple of {LANES}; "
                "set attention_backend='xla'"
            )
        library.add_latents()

    def cache_shape(
        self, config: LatentConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        shape = (num_blocks, round_up(block_size, LANES), _row_width(config))
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    def prepare(
        self, batch: RaggedBatch, configs: tuple[LatentConfig, ...], *, num_tokens: int
    ) -> None:
        del batch, configs, num_tokens

    def attend(
        self,
        q: jax.Array,
        rows: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: None,
        *,
        config: LatentConfig,
    ) -> tuple[jax.Array, jax.Array]:
        del prepared
        assert isinstance(self.library, Library), self
        assert rows.dtype == cache.dtype == q.dtype, (rows.dtype, cache.dtype, q.dtype)
        beside_row = _row_width(config) - config.head_size
        if beside_row:
            q = jnp.pad(q, ((0, 0), (0, 0), (0, beside_row)))
            rows = jnp.pad(rows, ((0, 0), (0, beside_row)))
        call = jax.ffi.ffi_call(
            self.library.target("jaxllm_latents", q.dtype),
            (
                jax.ShapeDtypeStruct((*q.shape[:2], config.latent_size), q.dtype),
                jax.ShapeDtypeStruct(cache.shape, cache.dtype),
            ),
            input_output_aliases={2: 1},
        )
        out, cache = call(
            q,
            rows,
            cache,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            scale=np.float32(config.scale),
            block_size=np.int64(batch.block_size),
            fewest_fresh=np.int64(config.fewest_fresh),
        )
        return out, cache


def _row_width(config: LatentConfig) -> int:
    """The size of a row in the cache."""
    return round_up(config.head_size, LANES)

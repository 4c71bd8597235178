"""The simplest correct implementation of the op: the specification for all others.

Each token separately attends to the whole block table of its row, in float32. For tests only.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.common import from_storage
from jaxllm_kernels.mla.api import LatentConfig, check_latent
from jaxllm_kernels.mla.pages import pages_shape, write_rows
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import BatchLimits, RaggedBatch, locate_tokens
from jaxllm_kernels.ragged_paged_attention.pages import write_blocks


@dataclass(frozen=True)
class ReferenceLatentBackend:
    """Attention token by token, over every possible block of a row."""

    name: str = "reference"

    @property
    def cache_head_axis(self) -> None:
        return None

    def tuned_for(self, chip: Chip) -> "ReferenceLatentBackend":
        del chip
        return self

    def check(
        self, config: LatentConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        del config, chip
        check_latent(limits, dtype=dtype)

    def cache_shape(
        self, config: LatentConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        return pages_shape(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype)

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
        places = locate_tokens(batch, len(q))
        cache = write_rows(cache, rows, write_blocks(batch, places), places.positions)

        def attend_one(token):
            q, row, position = token
            pages = from_storage(cache[batch.block_tables[row]], rows.dtype)
            keys = pages.reshape(-1, pages.shape[-1])[:, : config.head_size].astype(jnp.float32)
            visible = jnp.arange(len(keys)) <= position
            # Rows that are not visible may be NaN, which a weight of zero would not remove.
            keys = jnp.where(visible[:, None], keys, 0)
            scores = config.scale * jnp.matmul(q.astype(jnp.float32), keys.T, precision="highest")
            scores = jnp.where(visible, scores, -jnp.inf)
            largest = scores.max(axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
            weights = jnp.exp(scores - largest)
            values = keys[:, : config.latent_size]
            out = jnp.matmul(weights, values, precision="highest")
            # A token of padding sees nothing: zero divided by tiny is zero.
            total = weights.sum(axis=-1, keepdims=True)
            return (out / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)).astype(q.dtype)

        return jax.lax.map(attend_one, (q, places.rows, places.positions)), cache

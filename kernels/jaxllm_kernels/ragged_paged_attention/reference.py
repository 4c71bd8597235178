"""The simplest correct implementation of the op: the specification for all others.

Each token separately attends to the whole block table of its row, in float32. Every token costs as
much as the longest possible context, so this is for tests only.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.common import from_storage
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    BatchLimits,
    KVScales,
    RaggedBatch,
    check_common,
    locate_tokens,
)
from jaxllm_kernels.ragged_paged_attention.pages import (
    HEAD_AXIS,
    keys_and_values,
    pages_shape,
    to_cached,
    write_blocks,
    write_pages,
)


@dataclass(frozen=True)
class ReferenceBackend:
    """Attention token by token, over every possible block of a row."""

    name: str = "reference"
    sees_ahead: ClassVar[Literal[True]] = True

    @property
    def cache_head_axis(self) -> int:
        return HEAD_AXIS

    def tuned_for(self, chip: Chip) -> "ReferenceBackend":
        del chip
        return self

    def check(
        self, config: AttentionConfig, limits: BatchLimits, *, dtype: DTypeLike, chip: Chip
    ) -> None:
        del chip
        check_common(config, limits, dtype=dtype)

    def cache_shape(
        self, config: AttentionConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        return pages_shape(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype)

    def prepare(
        self, batch: RaggedBatch, configs: tuple[AttentionConfig, ...], *, num_tokens: int
    ) -> None:
        del batch, configs, num_tokens

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: None,
        *,
        config: AttentionConfig,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        del prepared
        places = locate_tokens(batch, q.shape[0])
        last_seen = places.positions if batch.last_seen is None else batch.last_seen
        k, v = to_cached(k, v, config, kv_scales)
        cache = write_pages(cache, k, v, write_blocks(batch, places), places.positions)

        def attend_one(token):
            q, row, position, last = token
            pages = from_storage(cache[batch.block_tables[row]], k.dtype).astype(jnp.float32)
            # [P, 1 or 2, K, block_size, width] -> [1 or 2, K, tokens, width]
            pages = jnp.moveaxis(pages, 0, 2)
            pages = pages.reshape(*pages.shape[:2], -1, pages.shape[-1])
            keys, values = keys_and_values(pages, config.head_size)
            if kv_scales is not None:
                keys *= kv_scales.k[:, None, None]
                values *= kv_scales.v[:, None, None]
            return _attend_one(q, keys, values, position, last, sinks, config)

        tokens = (q, places.rows, places.positions, last_seen)
        return jax.lax.map(attend_one, tokens), cache


def _attend_one(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    position: jax.Array,
    last_seen: jax.Array,
    sinks: jax.Array | None,
    config: AttentionConfig,
) -> jax.Array:
    """Attention of the token q [N, H] at a position to keys [K, tokens, H] and their values, up to
    the last one that it sees. A token of padding, at -1, sees none."""
    num_kv_heads, head_size = config.num_kv_heads, config.head_size
    kv_positions = jnp.arange(keys.shape[1])
    visible = (kv_positions <= last_seen) & (position >= 0)
    if config.sliding_window is not None:
        visible &= kv_positions > position - config.sliding_window
    if config.chunk is not None:
        visible &= kv_positions >= position - position % config.chunk
    # Keys and values that are not visible may be NaN, which a weight of zero would not remove.
    keys, values = (jnp.where(visible[:, None], x, 0) for x in (keys, values))

    grouped = q.reshape(num_kv_heads, -1, head_size).astype(jnp.float32)
    scores = config.scale * jnp.einsum("kgh,kth->kgt", grouped, keys, precision="highest")
    if config.soft_cap is not None:
        scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
    scores = jnp.where(visible, scores, -jnp.inf)
    if sinks is None:
        sinks = jnp.full(config.num_heads, -jnp.inf)
    sink_scores = sinks.reshape(num_kv_heads, -1, 1).astype(jnp.float32)
    largest = scores.max(axis=-1, keepdims=True, initial=jnp.finfo(jnp.float32).min)
    largest = jnp.maximum(largest, sink_scores)
    weights = jnp.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink_scores - largest)
    out = jnp.einsum("kgt,kth->kgh", weights, values, precision="highest")
    # A token of padding sees nothing: zero divided by tiny is zero.
    out /= jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    return out.reshape(config.num_heads, -1).astype(q.dtype)

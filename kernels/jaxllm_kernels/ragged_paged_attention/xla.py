"""The implementation in plain XLA, for chips without a kernel.

The queries of a row are cut into tiles of consecutive tokens. An outer loop takes the tiles. An
inner loop takes the blocks with keys that the tile sees, and folds them into the running softmax of
the tile's queries. The batch determines the length of both loops. So the cost depends on the actual
context lengths, not on the largest possible ones. Scores exist only for the tiles and blocks of one
iteration.

The number of tiles and blocks per iteration depends on the chip. A CPU takes one of each: XLA:CPU
copies a slice of the cache several times faster than it gathers or concatenates several, and with
blocks of 32 or more tokens the overhead of the loop is small. An accelerator takes many, because
each iteration costs some microseconds; tiles that run together have contexts of similar length.

Decodes are tiles of one token and have their own loop; tiles of prefill chunks are larger.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxllm_kernels.common import cdiv, from_storage
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
from jaxllm_kernels.ragged_paged_attention.tiles import (
    Tile,
    attend_tiles,
    cut_tiles,
    decode_tiles,
)

# The score of a key that is not seen. It is finite, because a block may have only such keys for a
# query: their weights are one. As soon as the query sees a key, exp(_UNSEEN - score) = 0 multiplies
# them, and every query sees at least its own key.
_UNSEEN = float(jnp.finfo(jnp.float32).min)


class Prepared(NamedTuple):
    """The values that the layers of a step share."""

    positions: jax.Array  # int32 [T]
    write_blocks: jax.Array  # int32 [T]
    # Decodes as tiles of one token, the first num_decodes of them.
    decodes: Tile
    num_decodes: jax.Array  # int32 []
    # The tiles of prefill chunks, and how many there are; None if the batch is decode_only.
    chunks: Tile | None
    num_chunks: jax.Array  # int32 []


@dataclass(frozen=True)
class XlaBackend:
    """Attention by loops over tiles of queries and blocks of keys."""

    sees_ahead: ClassVar[Literal[True]] = True
    name: str = "xla"
    # Tokens of a prefill tile. On two CPU cores, in processor time of benchmarks/attention_xla.py
    # with blocks of 64: 32 beats 64 and 128 by a quarter on prompts of 128 and 2048 tokens.
    tile_size: int = 32
    # Per iteration: the number of decodes or prefill tiles, and of keys of each, as whole blocks.
    decodes_at_once: int = 1
    tiles_at_once: int = 1
    keys_at_once: int = 1
    # Whether products are computed in float32. CPUs without 16-bit arithmetic take longer to round
    # to 16 bits than to multiply.
    widen: bool = True

    @property
    def cache_head_axis(self) -> int:
        return HEAD_AXIS

    def tuned_for(self, chip: Chip) -> "XlaBackend":
        if chip.platform == "cpu":
            return self
        # Estimates: an iteration fills a chip, and its scores stay below 100 MB for 32 heads.
        return dataclasses.replace(
            self,
            tile_size=64,
            decodes_at_once=64,
            tiles_at_once=16,
            keys_at_once=512,
            widen=False,
        )

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
    ) -> Prepared:
        del configs
        places = locate_tokens(batch, num_tokens)
        chunks, num_chunks = None, jnp.zeros((), jnp.int32)
        if not batch.decode_only:
            chunks, num_chunks = cut_tiles(batch, num_tokens, self._tile_size(num_tokens))
        return Prepared(
            places.positions,
            write_blocks(batch, places),
            decode_tiles(batch, by_length=self.decodes_at_once > 1),
            batch.num_decodes,
            chunks,
            num_chunks,
        )

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Prepared,
        *,
        config: AttentionConfig,
        sinks: jax.Array | None = None,
        kv_scales: KVScales | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        dtype = jnp.float32 if self.widen else q.dtype
        k, v = to_cached(k, v, config, kv_scales)
        cache = write_pages(cache, k, v, prepared.write_blocks, prepared.positions)
        layer = _Layer(
            config=config,
            batch=batch,
            cache=cache,
            cached_dtype=k.dtype,
            product_dtype=dtype,
            blocks_at_once=cdiv(self.keys_at_once, batch.block_size),
            sinks=sinks,
            kv_scales=kv_scales,
        )
        num_tokens = q.shape[0]
        tile_size = 1 if batch.decode_only else self._tile_size(num_tokens)
        # The last tile may extend past the last token. The outputs are float32, because XLA:CPU
        # converts a whole 16-bit array to update a slice of it.
        queries = jnp.pad(q, ((0, tile_size - 1), (0, 0), (0, 0))).astype(dtype)
        out = jnp.zeros((*queries.shape[:2], config.value_size), jnp.float32)
        attend = functools.partial(_attend_tile, layer)
        out = attend_tiles(
            attend, queries, out, prepared.decodes, prepared.num_decodes, 1, self.decodes_at_once
        )
        if prepared.chunks is not None:
            out = attend_tiles(
                attend,
                queries,
                out,
                prepared.chunks,
                prepared.num_chunks,
                tile_size,
                self.tiles_at_once,
            )
        return out[:num_tokens].astype(q.dtype), cache

    def _tile_size(self, num_tokens: int) -> int:
        return min(self.tile_size, num_tokens)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The inputs that all tiles of a call share."""

    config: AttentionConfig
    batch: RaggedBatch
    cache: jax.Array
    cached_dtype: DTypeLike
    product_dtype: DTypeLike
    blocks_at_once: int
    sinks: jax.Array | None
    kv_scales: KVScales | None


def _attend_tile(layer: _Layer, q: jax.Array, tile: Tile) -> jax.Array:
    """Compute the attention of a tile's queries [tile size, N, H] in float32."""
    config, batch = layer.config, layer.batch
    tile_size, num_heads, head_size = q.shape
    num_kv_heads = config.num_kv_heads
    group_size = num_heads // num_kv_heads
    block_size, blocks_at_once = batch.block_size, layer.blocks_at_once
    product = functools.partial(
        jnp.einsum,
        precision="highest" if layer.product_dtype == jnp.float32 else "default",
        preferred_element_type=jnp.float32,
    )

    # Per kv head, one line for each token and each query head of its group.
    lines = q.reshape(tile_size, num_kv_heads, group_size, head_size).swapaxes(0, 1)
    lines = lines.reshape(num_kv_heads, -1, head_size)
    scale = jnp.float32(config.scale)
    if layer.kv_scales is not None:
        scale *= layer.kv_scales.k[:, None, None]

    position = batch.context_lens[tile.row] - (batch.query_starts[tile.row + 1] - tile.token)
    end = position + tile.num_tokens
    start = jnp.zeros_like(end)
    if config.sliding_window is not None:
        start = jnp.maximum(position - config.sliding_window + 1, 0)
    if config.chunk is not None:
        start = position - position % config.chunk
    # Tokens past the row's end get the last position, so that they see nothing past the context.
    positions = position + jnp.arange(lines.shape[1], dtype=jnp.int32)[:, None] // group_size
    positions = jnp.minimum(positions, end - 1)
    last_seen = positions
    if batch.last_seen is not None:
        tokens = jnp.minimum(jnp.arange(tile_size), tile.num_tokens - 1) + tile.token
        of_tokens = batch.last_seen[tokens]
        last_seen = jnp.repeat(of_tokens, group_size)[:, None]
        end = jnp.maximum(end, of_tokens.max() + 1)
    first_block = start // block_size

    def attend_blocks(i: jax.Array, softmax: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, weighted = softmax
        block = first_block + i * blocks_at_once
        pages = _fetch_blocks(layer, tile.row, block)
        key, value = keys_and_values(pages, head_size)  # [K, keys, H] and [K, keys, V]

        keys = block * block_size + jnp.arange(blocks_at_once * block_size, dtype=jnp.int32)
        is_seen = keys <= last_seen
        if config.sliding_window is not None:
            is_seen &= keys > positions - config.sliding_window
        if config.chunk is not None:
            is_seen &= keys >= positions - positions % config.chunk
        scores = scale * product("klh,kbh->klb", lines, key)
        if config.soft_cap is not None:
            scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
            # This also replaces scores of garbage keys.
        scores = jnp.where(is_seen, scores, _UNSEEN)

        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        weights = jnp.exp(scores - new_largest[..., None])
        decay = jnp.exp(largest - new_largest)
        # A weight of zero does not remove NaN garbage.
        value = jnp.where(((start <= keys) & (keys < end))[:, None], value, 0)
        new_weighted = product("klb,kbh->klh", weights.astype(layer.product_dtype), value)
        return (
            new_largest,
            total * decay + weights.sum(axis=-1),
            weighted * decay[..., None] + new_weighted,
        )

    largest = jnp.full(lines.shape[:2], _UNSEEN)
    total = jnp.zeros(lines.shape[:2])
    if layer.sinks is not None:
        grouped_sinks = layer.sinks.astype(jnp.float32).reshape(num_kv_heads, group_size)
        largest, total = jnp.tile(grouped_sinks, tile_size), jnp.ones_like(total)
    num_blocks = (end - 1) // block_size + 1 - first_block
    _, total, weighted = lax.fori_loop(
        0,
        -(-num_blocks // blocks_at_once),
        attend_blocks,
        (largest, total, jnp.zeros((*lines.shape[:2], config.value_size), jnp.float32)),
    )
    out = weighted / total[..., None]
    if layer.kv_scales is not None:
        out *= layer.kv_scales.v[:, None, None]
    out = out.reshape(num_kv_heads, tile_size, group_size, -1)
    return out.swapaxes(0, 1).reshape(tile_size, num_heads, -1)


def _fetch_blocks(layer: _Layer, row: jax.Array, first: jax.Array) -> jax.Array:
    """Keys and values of a row's blocks from index `first` on: [1 or 2, K, keys, width]."""
    tables, cache = layer.batch.block_tables, layer.cache
    if layer.blocks_at_once == 1:
        page = lax.dynamic_index_in_dim(cache, tables[row, first], keepdims=False)
    else:
        blocks = first + jnp.arange(layer.blocks_at_once, dtype=jnp.int32)
        # Entries past the context are garbage: they are clipped here and masked by the caller.
        pages = cache.at[tables.at[row, blocks].get(mode="clip")].get(mode="clip")
        page = pages.transpose(1, 2, 0, 3, 4).reshape(*cache.shape[1:3], -1, cache.shape[4])
    return from_storage(page, layer.cached_dtype).astype(layer.product_dtype)

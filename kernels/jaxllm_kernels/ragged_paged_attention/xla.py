"""The implementation in plain XLA: what CPUs run, and others that have no kernel of their own.

The queries of a row are cut into tiles of consecutive tokens. One loop takes the tiles, a loop
within takes the blocks in which the tile sees a key, and folds each into the running softmax of the
tile's queries. Both loops are as long as the batch asks for, so the cost follows the tokens that
are attended to, not the lengths that are possible, and scores never exist for more than one tile
and block.

One block at a time, because XLA:CPU copies a slice of the cache several times faster than it
gathers or concatenates several; blocks of 32 tokens and more make the loop's own cost small.

Decodes are tiles of one token, and have a loop to themselves; prefill chunks have larger ones.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
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
    pages_shape,
    to_cached,
    write_blocks,
    write_pages,
)

# The score of a key that is not seen. It is finite, so that a query may meet such keys alone: their
# weights, all one, are multiplied by exp(_UNSEEN - score) = 0 as soon as it sees a key, and none
# ends without its own.
_UNSEEN = float(jnp.finfo(jnp.float32).min)


class Tile(NamedTuple):
    """Consecutive query tokens of a row; scalars, or arrays over the tiles of a batch."""

    row: jax.Array  # int32
    token: jax.Array  # int32: flat position of the first one
    num_tokens: jax.Array  # int32: at most the tile size


class Prepared(NamedTuple):
    """What the layers of a step share."""

    positions: jax.Array  # int32 [T]
    write_blocks: jax.Array  # int32 [T]
    # The tiles of prefill chunks, and how many there are; None if the batch is decode_only.
    tiles: Tile | None
    num_tiles: jax.Array  # int32 []


@dataclass(frozen=True)
class XlaBackend:
    """Attention by loops over tiles of queries and blocks of keys."""

    name: str = "xla"
    # Tokens of a prefill tile. On two CPU cores, in processor time of benchmarks/attention_xla.py
    # with blocks of 64: 32 beats 64 and 128 by a quarter on prompts of 128 and 2048 tokens.
    tile_size: int = 32

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
        tiles, num_tiles = None, jnp.zeros((), jnp.int32)
        if not batch.decode_only:
            tiles, num_tiles = _cut_tiles(batch, num_tokens, self._tile_size(num_tokens))
        return Prepared(places.positions, write_blocks(batch, places), tiles, num_tiles)

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
        k, v = to_cached(k, v, config, kv_scales)
        cache = write_pages(cache, k, v, prepared.write_blocks, prepared.positions)
        num_tokens = q.shape[0]
        tile_size = 1 if batch.decode_only else self._tile_size(num_tokens)
        # The last tile may reach behind the last token. Float32 here and in the outputs, because
        # XLA:CPU converts a whole 16-bit array to update a slice of it.
        queries = jnp.pad(q, ((0, tile_size - 1), (0, 0), (0, 0))).astype(jnp.float32)

        def attend_decode(i: jax.Array, out: jax.Array) -> jax.Array:
            return attend_tile(out, Tile(row=i, token=i, num_tokens=jnp.ones_like(i)), 1)

        def attend_prefill(i: jax.Array, out: jax.Array) -> jax.Array:
            return attend_tile(out, jax.tree.map(lambda x: x[i], prepared.tiles), tile_size)

        # A tile may also reach into the next row's tokens; they come later and overwrite it.
        def attend_tile(out: jax.Array, tile: Tile, size: int) -> jax.Array:
            tile_q = lax.dynamic_slice_in_dim(queries, tile.token, size)
            new = _attend_tile(tile_q, cache, batch, tile, config, sinks, kv_scales, k.dtype)
            return lax.dynamic_update_slice_in_dim(out, new, tile.token, axis=0)

        out = lax.fori_loop(0, batch.num_decodes, attend_decode, jnp.zeros_like(queries))
        if not batch.decode_only:
            out = lax.fori_loop(0, prepared.num_tiles, attend_prefill, out)
        return out[:num_tokens].astype(q.dtype), cache

    def _tile_size(self, num_tokens: int) -> int:
        return min(self.tile_size, num_tokens)


def _cut_tiles(batch: RaggedBatch, num_tokens: int, tile_size: int) -> tuple[Tile, jax.Array]:
    """Cut the rows that are not decodes into tiles; returns them and their number."""
    num_rows = batch.context_lens.shape[0]
    lengths = jnp.diff(batch.query_starts)
    lengths = jnp.where(jnp.arange(num_rows) < batch.num_decodes, 0, lengths)
    ends = jnp.cumsum(-(-lengths // tile_size), dtype=jnp.int32)  # of a row's tiles
    tiles = jnp.arange(num_tokens // tile_size + min(num_rows, num_tokens), dtype=jnp.int32)
    rows = jnp.searchsorted(ends, tiles, side="right", method="compare_all").astype(jnp.int32)
    rows = jnp.minimum(rows, num_rows - 1)
    firsts = jnp.where(rows > 0, ends[rows - 1], 0)
    offsets = (tiles - firsts) * tile_size
    return (
        Tile(
            row=rows,
            token=batch.query_starts[rows] + offsets,
            num_tokens=jnp.minimum(lengths[rows] - offsets, tile_size),
        ),
        ends[-1],
    )


def _attend_tile(
    q: jax.Array,
    cache: jax.Array,
    batch: RaggedBatch,
    tile: Tile,
    config: AttentionConfig,
    sinks: jax.Array | None,
    kv_scales: KVScales | None,
    dtype: DTypeLike,
) -> jax.Array:
    """Attention of a tile's queries, float32 [tile size, N, H], to a cache of a dtype."""
    tile_size, num_heads, head_size = q.shape
    num_kv_heads = config.num_kv_heads
    group_size = num_heads // num_kv_heads
    block_size = batch.block_size
    # Products are in float32: CPUs without 16-bit arithmetic spend more on rounding the weights to
    # 16 bits than on the products. Accelerators may use what suits the dtype.
    precision = "highest" if dtype == jnp.float32 else "default"

    # Per kv head, a line for every token and every query head that shares it.
    lines = q.reshape(tile_size, num_kv_heads, group_size, head_size).swapaxes(0, 1)
    lines = lines.reshape(num_kv_heads, -1, head_size)
    if kv_scales is not None:
        lines *= kv_scales.k[:, None, None]

    position = batch.context_lens[tile.row] - (batch.query_starts[tile.row + 1] - tile.token)
    end = position + tile.num_tokens
    start = jnp.zeros_like(end)
    if config.sliding_window is not None:
        start = jnp.maximum(position - config.sliding_window + 1, 0)
    # Tokens behind the row's last one see what that sees, and never what lies behind the context.
    positions = position + jnp.arange(lines.shape[1], dtype=jnp.int32)[:, None] // group_size
    positions = jnp.minimum(positions, end - 1)

    def attend_block(i: jax.Array, softmax: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, weighted = softmax
        page = lax.dynamic_index_in_dim(cache, batch.block_tables[tile.row, i], keepdims=False)
        key, value = from_storage(page, dtype).astype(jnp.float32)  # [K, block_size, H]

        keys = i * block_size + jnp.arange(block_size, dtype=jnp.int32)
        is_seen = keys <= positions
        if config.sliding_window is not None:
            is_seen &= keys > positions - config.sliding_window
        scores = config.scale * jnp.einsum("klh,kbh->klb", lines, key, precision=precision)
        if config.soft_cap is not None:
            scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
        # This also replaces what came of garbage keys.
        scores = jnp.where(is_seen, scores, _UNSEEN)

        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        weights = jnp.exp(scores - new_largest[..., None])
        decay = jnp.exp(largest - new_largest)
        # A weight of zero does not silence garbage that is NaN.
        value = jnp.where(((start <= keys) & (keys < end))[:, None], value, 0)
        new_weighted = jnp.einsum("klb,kbh->klh", weights, value, precision=precision)
        return (
            new_largest,
            total * decay + weights.sum(axis=-1),
            weighted * decay[..., None] + new_weighted,
        )

    largest = jnp.full(lines.shape[:2], _UNSEEN)
    total = jnp.zeros(lines.shape[:2])
    if sinks is not None:
        grouped_sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, group_size)
        largest, total = jnp.tile(grouped_sinks, tile_size), jnp.ones_like(total)
    _, total, weighted = lax.fori_loop(
        start // block_size,
        (end - 1) // block_size + 1,
        attend_block,
        (largest, total, jnp.zeros(lines.shape, jnp.float32)),
    )
    out = weighted / total[..., None]
    if kv_scales is not None:
        out *= kv_scales.v[:, None, None]
    out = out.reshape(num_kv_heads, tile_size, group_size, head_size)
    return out.swapaxes(0, 1).reshape(q.shape)

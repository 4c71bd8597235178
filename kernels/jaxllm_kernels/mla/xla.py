"""The implementation in plain XLA: loops over tiles of queries and blocks of rows.

It is built like the XLA form of `ragged_paged_attention`: the batch determines the length of the
loops, and scores exist for one iteration only. All heads of a tile share the rows that an iteration
loads, so a tile has a number of lines (tokens x heads) and not of tokens.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxllm_kernels.common import cdiv, from_storage
from jaxllm_kernels.mla.api import LatentConfig, check_latent
from jaxllm_kernels.mla.pages import pages_shape, row_width, write_rows
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import (
    BatchLimits,
    RaggedBatch,
    fresh_rows,
    locate_tokens,
)
from jaxllm_kernels.ragged_paged_attention.pages import write_blocks
from jaxllm_kernels.ragged_paged_attention.tiles import (
    Tile,
    attend_tiles,
    cut_tiles,
    decode_tiles,
)

# The score of a row that is not seen. It is finite: see `ragged_paged_attention.xla`.
_UNSEEN = float(jnp.finfo(jnp.float32).min)


class Prepared(NamedTuple):
    """The values that the layers of a step share."""

    positions: jax.Array  # int32 [T]
    write_blocks: jax.Array  # int32 [T]
    decodes: Tile
    # The tiles of prefill chunks for each number of heads and of fewest fresh tokens, and how many
    # there are; empty if the batch is decode_only.
    chunks: dict[tuple[int, int], tuple[Tile, jax.Array]]


@dataclass(frozen=True)
class XlaLatentBackend:
    """Latent attention by loops over tiles of queries and blocks of rows."""

    name: str = "xla"
    # Lines of a prefill tile: its sums of latents, of 512 float32 each, stay in the cache of a CPU.
    tile_lines: int = 512
    # Per iteration: the number of decodes or prefill tiles, and of tokens of each, as whole blocks.
    decodes_at_once: int = 1
    tiles_at_once: int = 1
    tokens_at_once: int = 1
    # Whether products are computed in float32, as in the XLA form of `ragged_paged_attention`.
    widen: bool = True

    @property
    def cache_head_axis(self) -> None:
        return None

    def tuned_for(self, chip: Chip) -> "XlaLatentBackend":
        if chip.platform == "cpu":
            return self
        # Estimates: an iteration of 16 tiles has 16 MB of scores and 10 MB of rows.
        return dataclasses.replace(
            self, decodes_at_once=32, tiles_at_once=16, tokens_at_once=512, widen=False
        )

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
    ) -> Prepared:
        places = locate_tokens(batch, num_tokens)
        kinds = {(config.num_heads, config.fewest_fresh) for config in configs}

        def chunks(num_heads: int, fewest: int) -> tuple[Tile, jax.Array]:
            lengths = jnp.where(fresh_rows(batch, fewest), 0, jnp.diff(batch.query_starts))
            return cut_tiles(batch, num_tokens, self._tile_size(num_heads, num_tokens), lengths)

        return Prepared(
            places.positions,
            write_blocks(batch, places),
            decode_tiles(batch, by_length=self.decodes_at_once > 1),
            {} if batch.decode_only else {kind: chunks(*kind) for kind in kinds},
        )

    def attend(
        self,
        q: jax.Array,
        rows: jax.Array,
        cache: jax.Array,
        batch: RaggedBatch,
        prepared: Prepared,
        *,
        config: LatentConfig,
    ) -> tuple[jax.Array, jax.Array]:
        dtype = jnp.float32 if self.widen else q.dtype
        cache = write_rows(cache, rows, prepared.write_blocks, prepared.positions)
        layer = _Layer(
            config=config,
            batch=batch,
            cache=cache,
            cached_dtype=rows.dtype,
            product_dtype=dtype,
            blocks_at_once=cdiv(self.tokens_at_once, batch.block_size),
        )
        num_tokens, num_heads, _ = q.shape
        tile_size = 1 if batch.decode_only else self._tile_size(num_heads, num_tokens)
        # The last tile may extend past the last token. Queries are zero where rows are padded.
        beside_row = row_width(config) - config.head_size
        queries = jnp.pad(q, ((0, tile_size - 1), (0, 0), (0, beside_row))).astype(dtype)
        # float32, because XLA:CPU converts a whole 16-bit array to update a slice of it.
        out = jnp.zeros((*queries.shape[:2], config.latent_size), jnp.float32)
        attend = functools.partial(_attend_tile, layer)
        out = attend_tiles(
            attend, queries, out, prepared.decodes, batch.num_decodes, 1, self.decodes_at_once
        )
        if not batch.decode_only:
            chunks, num_chunks = prepared.chunks[num_heads, config.fewest_fresh]
            out = attend_tiles(
                attend, queries, out, chunks, num_chunks, tile_size, self.tiles_at_once
            )
        return out[:num_tokens].astype(q.dtype), cache

    def _tile_size(self, num_heads: int, num_tokens: int) -> int:
        """Tokens of a prefill tile."""
        return min(max(self.tile_lines // num_heads, 1), num_tokens)


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The inputs that all tiles of a call share."""

    config: LatentConfig
    batch: RaggedBatch
    cache: jax.Array
    cached_dtype: DTypeLike
    product_dtype: DTypeLike
    blocks_at_once: int


def _attend_tile(layer: _Layer, q: jax.Array, tile: Tile) -> jax.Array:
    """Compute a tile's weighted sums of latents [tile size, N, L] in float32."""
    config, batch = layer.config, layer.batch
    tile_size, num_heads, width = q.shape
    block_size, blocks_at_once = batch.block_size, layer.blocks_at_once
    product = functools.partial(
        jnp.matmul,
        precision="highest" if layer.product_dtype == jnp.float32 else "default",
        preferred_element_type=jnp.float32,
    )
    lines = q.reshape(-1, width)
    position = batch.context_lens[tile.row] - (batch.query_starts[tile.row + 1] - tile.token)
    end = position + tile.num_tokens
    # Tokens past the row's end get the last position, so that they see nothing past the context.
    positions = position + jnp.arange(len(lines), dtype=jnp.int32)[:, None] // num_heads
    positions = jnp.minimum(positions, end - 1)

    def attend_blocks(i: jax.Array, softmax: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, weighted = softmax
        block = i * blocks_at_once
        rows = _fetch_blocks(layer, tile.row, block)  # [tokens, width]
        tokens = block * block_size + jnp.arange(blocks_at_once * block_size, dtype=jnp.int32)
        scores = jnp.float32(config.scale) * product(lines, rows.T)
        # This also replaces scores of garbage.
        scores = jnp.where(tokens <= positions, scores, _UNSEEN)
        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        weights = jnp.exp(scores - new_largest[:, None])
        decay = jnp.exp(largest - new_largest)
        # A weight of zero does not remove NaN garbage.
        latents = jnp.where((tokens < end)[:, None], rows[:, : config.latent_size], 0)
        return (
            new_largest,
            total * decay + weights.sum(axis=-1),
            weighted * decay[:, None] + product(weights.astype(layer.product_dtype), latents),
        )

    nothing = (
        jnp.full(len(lines), _UNSEEN),
        jnp.zeros(len(lines)),
        jnp.zeros((len(lines), config.latent_size), jnp.float32),
    )
    num_blocks = (end - 1) // block_size + 1
    _, total, weighted = lax.fori_loop(0, -(-num_blocks // blocks_at_once), attend_blocks, nothing)
    return (weighted / total[:, None]).reshape(tile_size, num_heads, -1)


def _fetch_blocks(layer: _Layer, row: jax.Array, first: jax.Array) -> jax.Array:
    """The cached rows of a request's blocks from index `first` on: [tokens, width]."""
    tables, cache = layer.batch.block_tables, layer.cache
    if layer.blocks_at_once == 1:
        pages = lax.dynamic_index_in_dim(cache, tables[row, first], keepdims=False)
    else:
        blocks = first + jnp.arange(layer.blocks_at_once, dtype=jnp.int32)
        # Entries past the context are garbage: they are clipped here and masked by the caller.
        pages = cache.at[tables.at[row, blocks].get(mode="clip")].get(mode="clip")
    pages = pages.reshape(-1, cache.shape[-1])
    return from_storage(pages, layer.cached_dtype).astype(layer.product_dtype)

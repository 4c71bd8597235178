"""Cuts the query tokens of a step into tiles, and computes them in a loop.

A tile is consecutive tokens of a row. Decodes are tiles of one token; tiles of prefill chunks are
larger. The batch determines the number of tiles, and so the length of the loop.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.ragged_paged_attention.pages import OUT_OF_RANGE


class Tile(NamedTuple):
    """Consecutive query tokens of a row: scalars, or arrays over the tiles of a batch."""

    row: jax.Array  # int32
    token: jax.Array  # int32: flat position of the first token
    num_tokens: jax.Array  # int32: at most the tile size


def decode_tiles(batch: RaggedBatch, *, by_length: bool) -> Tile:
    """The decode rows, which come first, as tiles; `by_length` sorts long contexts first."""
    rows = jnp.arange(batch.context_lens.shape[0], dtype=jnp.int32)
    if by_length:
        lengths = jnp.where(rows < batch.num_decodes, batch.context_lens, -1)
        rows = jnp.argsort(-lengths).astype(jnp.int32)
    return Tile(row=rows, token=rows, num_tokens=jnp.ones_like(rows))


def cut_tiles(
    batch: RaggedBatch, num_tokens: int, tile_size: int, lengths: jax.Array | None = None
) -> tuple[Tile, jax.Array]:
    """Cut the rows that are not decodes into tiles; return them and their number. `lengths` are
    how many of its first tokens each row has in tiles; None: all."""
    num_rows = batch.context_lens.shape[0]
    lengths = jnp.diff(batch.query_starts) if lengths is None else lengths
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


def attend_tiles(
    attend: Callable[[jax.Array, Tile], jax.Array],
    queries: jax.Array,
    out: jax.Array,
    tiles: Tile,
    num_tiles: jax.Array,
    tile_size: int,
    at_once: int,
) -> jax.Array:
    """Write the attention of the first num_tiles tiles to out [T, N, V].

    `attend` computes the queries of a tile, [tile size, N, H], into [tile size, N, V]. `at_once`
    tiles are computed together.
    """
    if at_once == 1:

        def attend_one(i: jax.Array, out: jax.Array) -> jax.Array:
            tile = jax.tree.map(lambda x: x[i], tiles)
            tile_q = lax.dynamic_slice_in_dim(queries, tile.token, tile_size)
            # A tile may extend into the next row's tokens; those come later and overwrite it.
            return lax.dynamic_update_slice_in_dim(out, attend(tile_q, tile), tile.token, axis=0)

        return lax.fori_loop(0, num_tiles, attend_one, out)

    at_once = min(at_once, len(tiles.row))

    def attend_group(i: jax.Array, out: jax.Array) -> jax.Array:
        indices = i * at_once + jnp.arange(at_once, dtype=jnp.int32)
        group = jax.tree.map(lambda x: x.at[indices].get(mode="clip"), tiles)
        group = group._replace(num_tokens=jnp.where(indices < num_tiles, group.num_tokens, 0))
        offsets = jnp.arange(tile_size, dtype=jnp.int32)
        tokens = group.token[:, None] + offsets
        new = jax.vmap(attend)(queries[tokens], group)
        tokens = jnp.where(offsets < group.num_tokens[:, None], tokens, OUT_OF_RANGE)
        return out.at[tokens].set(new, mode="drop")

    return lax.fori_loop(0, -(-num_tiles // at_once), attend_group, out)

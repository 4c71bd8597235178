"""What the GPU kernels of a step work through, computed on the device once for all its layers.

Both kernels are persistent: a fixed number of workers (thread blocks, one per multiprocessor) share
out as much work as the batch turns out to hold. The arrays below have static sizes; what is real in
them is dynamic. All of it is plain JAX.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm_kernels.common import cdiv
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch


class DecodeItems(NamedTuple):
    """Spans of keys that a worker attends to in one go; each leaves a partial softmax behind.

    The blocks of all (row, kv head) pairs, laid end to end, are cut at the borders of pairs and at
    the borders of equal shares, one share per worker. So no worker has more than one block above
    the average, whatever the lengths, and there are at most as many items as pairs and workers.
    """

    row: jax.Array  # int32 [W]
    head: jax.Array  # int32 [W]
    start: jax.Array  # int32 [W]: position of the first key to load
    end: jax.Array  # int32 [W]: position past the last; start for an item without keys
    first_seen: jax.Array  # int32 [W]: position of the first key inside the row's window


class DecodeWork(NamedTuple):
    """The items of a step's decodes."""

    items: DecodeItems
    # Worker w takes the items [worker_items[w], worker_items[w + 1]).
    worker_items: jax.Array  # int32 [workers + 1]
    # The partial results of pair p = row * K + head are those of the items [first, last).
    pair_first: jax.Array  # int32 [R * K]
    pair_last: jax.Array  # int32 [R * K]


class PrefillTiles(NamedTuple):
    """Consecutive query tokens of rows that are not decodes, those with the most keys first."""

    row: jax.Array  # int32 [W]
    token: jax.Array  # int32 [W]: flat position of the first one
    num_tokens: jax.Array  # int32 [W]: at most the tile size
    position: jax.Array  # int32 [W]: of the first one, in its row's context
    num_tiles: jax.Array  # int32 [1]: the rest are padding


def split_decodes(
    batch: RaggedBatch,
    *,
    num_kv_heads: int,
    sliding_window: int | None,
    block_tokens: int,
    load_tokens: int,
    num_workers: int,
) -> DecodeWork:
    """Share out the keys of a batch's decodes, in blocks, among the workers.

    A row's blocks begin at a multiple of load_tokens, so that no block loads a page from before the
    window.
    """
    num_rows = batch.context_lens.shape[0]
    lengths = jnp.where(jnp.arange(num_rows) < batch.num_decodes, batch.context_lens, 0)
    first_seen = jnp.zeros_like(lengths)
    if sliding_window is not None:
        first_seen = jnp.maximum(lengths - sliding_window, 0)
    row_start = first_seen // load_tokens * load_tokens
    row_blocks = cdiv_array(lengths - row_start, block_tokens)

    pair_blocks = jnp.repeat(row_blocks, num_kv_heads)
    pair_end = jnp.cumsum(pair_blocks, dtype=jnp.int32)
    pair_start = pair_end - pair_blocks
    total = pair_end[-1]
    share = cdiv_array(total, num_workers)
    worker_start = jnp.arange(num_workers + 1, dtype=jnp.int32) * share

    cuts = jnp.sort(jnp.concatenate([pair_start, jnp.minimum(worker_start[1:-1], total)]))
    next_cuts = jnp.append(cuts[1:], total)
    # Where pairs without blocks share a start with others, this finds the last, which has blocks.
    pair = _count_at_most(pair_start, cuts) - 1
    row = pair // num_kv_heads
    start = row_start[row] + (cuts - pair_start[pair]) * block_tokens
    end = start + (next_cuts - cuts) * block_tokens
    return DecodeWork(
        DecodeItems(
            row=row,
            head=pair % num_kv_heads,
            start=start,
            end=jnp.maximum(start, jnp.minimum(end, lengths[row])),
            first_seen=first_seen[row],
        ),
        # The items at the very end are empty and nobody's.
        worker_items=_count_below(cuts, jnp.minimum(worker_start, total)),
        pair_first=_count_below(cuts, pair_start),
        pair_last=_count_below(cuts, pair_end),
    )


def cut_prefills(batch: RaggedBatch, *, num_tokens: int, tile_tokens: int) -> PrefillTiles:
    """Cut the rows that are not decodes into tiles."""
    num_rows = batch.context_lens.shape[0]
    lengths = jnp.diff(batch.query_starts)
    lengths = jnp.where(jnp.arange(num_rows) < batch.num_decodes, 0, lengths)
    row_tiles = cdiv_array(lengths, tile_tokens)
    row_end = jnp.cumsum(row_tiles, dtype=jnp.int32)
    tiles = jnp.arange(cdiv(num_tokens, tile_tokens) + min(num_rows, num_tokens), dtype=jnp.int32)
    row = jnp.minimum(_count_at_most(row_end, tiles), num_rows - 1)
    offset = (tiles - (row_end - row_tiles)[row]) * tile_tokens
    position = batch.context_lens[row] - lengths[row] + offset
    num_tiles = row_end[-1]
    order = jnp.argsort(jnp.where(tiles < num_tiles, -position, jnp.iinfo(jnp.int32).max))
    return PrefillTiles(
        row=row[order],
        token=(batch.query_starts[row] + offset)[order],
        num_tokens=jnp.clip(lengths[row] - offset, 0, tile_tokens)[order],
        position=position[order],
        num_tiles=num_tiles[None],
    )


def cdiv_array(a: jax.Array, b: int) -> jax.Array:
    """Divide and round up."""
    return (a + (b - 1)) // b


def _count_below(ascending: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.searchsorted(ascending, x, side="left", method="compare_all").astype(jnp.int32)


def _count_at_most(ascending: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.searchsorted(ascending, x, side="right", method="compare_all").astype(jnp.int32)

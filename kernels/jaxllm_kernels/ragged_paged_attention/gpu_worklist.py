"""The worklists of the GPU kernels, computed on the device once per step for all layers.

Both kernels are persistent: a fixed number of workers (thread blocks, one per multiprocessor) share
the batch's work. The arrays below have static sizes, but the number of valid entries is dynamic.
All of this is plain JAX.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm_kernels.common import cdiv
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch


class DecodeItems(NamedTuple):
    """Spans of keys. A worker computes a partial softmax for each.

    The blocks of all pairs (row, kv head) are concatenated. They are cut at the borders of pairs
    and at the borders of equal shares, one share per worker. So no worker has more than one block
    above the average, whatever the lengths, and there are at most as many items as pairs plus
    workers. Shares are rounded up to blocks, so some workers may have nothing. That costs no
    bandwidth: the others read what is left of it (`benchmarks/gpu_bounds.py`). Shares in pages
    would have more, shorter items.

    Every item that a worker has is at least one block. (The producer relies on that, see
    `num_query_slots`.)
    """

    row: jax.Array  # int32 [W]
    head: jax.Array  # int32 [W]
    start: jax.Array  # int32 [W]: position of the first key to load
    end: jax.Array  # int32 [W]: position after the last key
    first_seen: jax.Array  # int32 [W]: position of the first key in the first token's window


class ShortRows(NamedTuple):
    """The queries of rows with several tokens, whose items come after those of decodes.

    The query heads of a kv head may be too many for one item. Then they are cut into parts, and
    each part has all of the row's pairs.
    """

    first_item: jax.Array  # int32 [1]
    # Of an item; of no meaning for those of decodes.
    part: jax.Array  # int32 [W]
    token: jax.Array  # int32 [W]: flat position of the row's first token
    position: jax.Array  # int32 [W]: position of the row's first token in its context
    # Of the batch.
    query_starts: jax.Array  # int32 [R + 1]


class DecodeWork(NamedTuple):
    """The items of a step's decodes and short rows."""

    items: DecodeItems
    # Worker w takes the items [worker_items[w], worker_items[w + 1]).
    worker_items: jax.Array  # int32 [workers + 1]
    # Pair p = (part * R + row) * K + head has the partial results of the items [first, last).
    pair_first: jax.Array  # int32 [parts * R * K]
    pair_last: jax.Array  # int32 [parts * R * K]
    short: ShortRows | None  # None if the batch is decode_only


class PrefillTiles(NamedTuple):
    """Consecutive query tokens of the rows that decodes do not take; most keys come first."""

    row: jax.Array  # int32 [W]
    token: jax.Array  # int32 [W]: flat position of the first token
    num_tokens: jax.Array  # int32 [W]: at most the tile size
    position: jax.Array  # int32 [W]: position of the first token in its row's context
    num_tiles: jax.Array  # int32 [1]: the rest are padding


def split_decodes(
    batch: RaggedBatch,
    *,
    num_kv_heads: int,
    short_parts: int,
    sliding_window: int | None,
    block_tokens: int,
    load_tokens: int,
    num_workers: int,
) -> DecodeWork:
    """Divide the keys of a batch's decodes and short rows, in blocks, among the workers.

    Decodes come first, then the short rows, `short_parts` times. A row's blocks begin at a multiple
    of load_tokens, so that no block loads a page before the window.
    """
    num_rows = batch.context_lens.shape[0]
    rows = jnp.arange(num_rows)
    num_parts, num_taken, num_tokens = 1, batch.num_decodes, jnp.ones((), jnp.int32)
    if not batch.decode_only:
        num_parts, num_taken = short_parts, batch.num_decodes + batch.num_short
        num_tokens = jnp.diff(batch.query_starts)
    lengths = jnp.where(rows < num_taken, batch.context_lens, 0)
    first_seen = jnp.zeros_like(lengths)
    if sliding_window is not None:
        first_seen = jnp.maximum(lengths - (num_tokens - 1) - sliding_window, 0)
    row_start = first_seen // load_tokens * load_tokens
    row_blocks = cdiv_array(lengths - row_start, block_tokens)

    is_short = rows >= batch.num_decodes
    pair_blocks, pair_start, worker_start = _lay_out(
        row_blocks, is_short, num_kv_heads, num_parts=num_parts, num_workers=num_workers
    )
    pair_end = pair_start + pair_blocks
    total = pair_end[-1]

    # Each cut once: two equal cuts would have an empty item between them. The others become the
    # end of everything.
    starts_pair = jnp.any(pair_start == worker_start[:, None], axis=1)
    worker_cuts = jnp.where(starts_pair, total, jnp.minimum(worker_start, total))
    pair_cuts = jnp.where(pair_blocks > 0, pair_start, total)
    cuts = jnp.sort(jnp.concatenate([pair_cuts, worker_cuts[1:-1]]))
    next_cuts = jnp.append(cuts[1:], total)
    # Pairs without blocks have the same start as the next pair. This finds the last, with blocks.
    pair = count_at_most(pair_start, cuts) - 1
    row = pair // num_kv_heads
    if num_parts > 1:
        row = row % num_rows
    start = row_start[row] + (cuts - pair_start[pair]) * block_tokens
    end = start + (next_cuts - cuts) * block_tokens
    short = None
    if not batch.decode_only:
        decode_blocks = jnp.where(is_short, 0, row_blocks).sum() * num_kv_heads
        short = ShortRows(
            first_item=count_below(cuts, decode_blocks[None]),
            part=pair // (num_rows * num_kv_heads),
            token=batch.query_starts[row],
            position=(batch.context_lens - num_tokens)[row],
            query_starts=batch.query_starts,
        )
    return DecodeWork(
        DecodeItems(
            row=row,
            head=pair % num_kv_heads,
            start=start,
            end=jnp.maximum(start, jnp.minimum(end, lengths[row])),
            first_seen=first_seen[row],
        ),
        # The items at the end are empty, and no worker has them.
        worker_items=count_below(cuts, jnp.minimum(worker_start, total)),
        pair_first=count_below(cuts, pair_start),
        pair_last=count_below(cuts, pair_end),
        short=short,
    )


def _lay_out(
    row_blocks: jax.Array,
    is_short: jax.Array,
    num_kv_heads: int,
    *,
    num_parts: int,
    num_workers: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The sequence of all blocks: blocks and starts of the pairs, and starts of the workers.

    The parts of a row read the same keys. So there are gaps between the parts: they begin at a
    multiple of a worker's share from each other. Then each part has workers of its own, and these
    are at the same keys at the same time: one of them finds in L2 what another has read. (Except
    the first worker of a part that would begin in a gap. It is early.)
    """

    def of_pairs(blocks: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Blocks and starts of the pairs of rows with so many blocks, and the number of all."""
        heads = jnp.arange(num_kv_heads, dtype=jnp.int32)
        end = running_sum(blocks)
        start = num_kv_heads * (end - blocks)[:, None] + heads * blocks[:, None]
        return jnp.repeat(blocks, num_kv_heads), start.reshape(-1), num_kv_heads * end[-1]

    workers = jnp.arange(num_workers + 1, dtype=jnp.int32)
    pair_blocks, pair_start, first_blocks = of_pairs(row_blocks)
    if num_parts == 1:
        return pair_blocks, pair_start, workers * cdiv_array(first_blocks, num_workers)
    short_blocks, short_start, part_blocks = of_pairs(jnp.where(is_short, row_blocks, 0))
    all_blocks = jnp.concatenate([pair_blocks, *[short_blocks] * (num_parts - 1)])
    others = (short_start + first_blocks + i * part_blocks for i in range(num_parts - 1))
    all_start = jnp.concatenate([pair_start, *others])
    total = first_blocks + (num_parts - 1) * part_blocks
    if num_workers <= num_parts:  # no room for gaps
        return all_blocks, all_start, workers * cdiv_array(total, num_workers)
    # The gaps are less than a share each.
    num_gaps = jnp.where(part_blocks > 0, num_parts, 0)
    share = jnp.maximum(cdiv_array(total, num_workers - num_gaps), 1)
    stride = jnp.maximum(cdiv_array(part_blocks, share), 1) * share
    part = jnp.arange(all_blocks.size, dtype=jnp.int32) // pair_blocks.size
    start = all_start + part * (stride - part_blocks)
    # A worker that would begin in a gap begins at its end.
    first_start = first_blocks - part_blocks
    part, offset = jnp.divmod(workers * share - first_start, stride)
    is_in_gap = (part >= 0) & (offset >= part_blocks)
    worker_start = jnp.where(is_in_gap, first_start + (part + 1) * stride, workers * share)
    return all_blocks, start, worker_start


def cut_prefills(batch: RaggedBatch, *, num_tokens: int, tile_tokens: int) -> PrefillTiles:
    """Cut the rows after the decodes and the short rows into tiles."""
    num_rows = batch.context_lens.shape[0]
    lengths = jnp.diff(batch.query_starts)
    lengths = jnp.where(jnp.arange(num_rows) < batch.num_decodes + batch.num_short, 0, lengths)
    row_tiles = cdiv_array(lengths, tile_tokens)
    row_end = jnp.cumsum(row_tiles, dtype=jnp.int32)
    tiles = jnp.arange(cdiv(num_tokens, tile_tokens) + min(num_rows, num_tokens), dtype=jnp.int32)
    row = jnp.minimum(count_at_most(row_end, tiles), num_rows - 1)
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


def item_of_worker(worker, i, num_workers: int):
    """The i-th item of a worker: worker by worker, in turns that go forth and back.

    Items are sorted, longest first. If every turn began with the first worker, it would have the
    longest item of each turn, and the last worker the shortest.
    """
    turned = jnp.where(lax.rem(i, jnp.int32(2)) == 0, worker, num_workers - 1 - worker)
    return i * num_workers + turned


def cdiv_array(a: jax.Array, b: int | jax.Array) -> jax.Array:
    """Divide and round up."""
    return (a + (b - 1)) // b


# All pairs of numbers are compared: a GPU does that in one launch, and takes several for a running
# sum or a search. Sums go along the last axis; along the first XLA launches the comparisons apart.


def running_sum(x: jax.Array) -> jax.Array:
    """The sum of all numbers up to each."""
    place = jnp.arange(x.size)
    return jnp.sum(jnp.where(place <= place[:, None], x, 0), axis=1, dtype=jnp.int32)


def count_below(numbers: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(numbers < x[:, None], axis=1, dtype=jnp.int32)


def count_at_most(numbers: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(numbers <= x[:, None], axis=1, dtype=jnp.int32)

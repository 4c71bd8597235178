"""The worklists of the GPU kernels, computed on the device once per step for all layers.

Both kernels are persistent: a fixed number of workers (thread blocks, one per multiprocessor) share
the batch's work. The arrays below have static sizes, but the number of valid entries is dynamic.
All of this is plain JAX.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm_kernels.common import cdiv
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch

# A place past the end of every sequence. Adding a row's blocks to it does not overflow.
_NEVER = 1 << 30


class ShortRows(NamedTuple):
    """Where the rows with several tokens are."""

    num_decodes: jax.Array  # int32 [1]: the rows before them
    num_short: jax.Array  # int32 [1]
    query_starts: jax.Array  # int32 [R + 1]


class DecodeWork(NamedTuple):
    """A step's decodes and short rows, and who computes what of them: see `DecodeSplit`."""

    row_start: jax.Array  # int32 [R + 1]: blocks of a kv head before each row
    context_lens: jax.Array  # int32 [R]
    # Worker w has blocks of the pairs [first_pair[w], last_pair[w]), and of each at least one.
    first_pair: jax.Array  # int32 [workers]
    last_pair: jax.Array  # int32 [workers]
    short: ShortRows | None  # None if the batch is decode_only


class Shares(NamedTuple):
    """How the sequence of all blocks is cut."""

    share: jax.Array  # blocks of a worker
    stride: jax.Array  # from a part of the short rows to the next
    first_short: jax.Array  # the number of the first pair of a short row
    num_short: jax.Array  # pairs of short rows, in each part


class Pair(NamedTuple):
    """A row and a kv head; of a short row, and a part of the query heads."""

    row: jax.Array
    head: jax.Array
    part: jax.Array


class DecodeItem(NamedTuple):
    """What a worker computes of a pair: a partial softmax over consecutive keys."""

    pair: Pair
    start: jax.Array  # position of the first key to load
    end: jax.Array  # position after the last key
    first_seen: jax.Array  # position of the first key in the first token's window


@dataclass(frozen=True, kw_only=True)
class DecodeSplit:
    """Divides the blocks of keys of decodes and short rows among workers.

    The blocks of all pairs (row, kv head) are one sequence: decodes come first, then short rows,
    `short_parts` times. It is cut into equal shares, one per worker. So no worker has more than one
    block above the average, whatever the lengths. Shares are rounded up to blocks, so some workers
    may have nothing. That costs no bandwidth: the others read what is left of it
    (`benchmarks/gpu_bounds.py`). Shares in pages would have more, shorter items.

    What a worker has of a pair is an item, of at least one block. (The producer relies on that, see
    `num_query_slots`.) Item and partial result of worker w and pair p have the number p + w, which
    no other item has. So the kernels compute what they need from where each row begins in the
    sequence, and there are no lists of items.

    The parts of a row read the same keys. So there are gaps between the parts: they begin at a
    multiple of a worker's share from each other. Then each part has workers of its own, and these
    are at the same keys at the same time: one of them finds in L2 what another has read.
    """

    num_kv_heads: int
    short_parts: int
    sliding_window: int | None
    block_tokens: int
    load_tokens: int  # a row's blocks begin at a multiple of it, so none is before the window
    num_workers: int

    def __lt__(self, other: "DecodeSplit") -> bool:
        """An order, by which JAX sorts the keys of a dict. A window may be None."""
        mine, others = (
            [value or 0 for value in dataclasses.astuple(split)] for split in (self, other)
        )
        return mine < others

    # These work on arrays, and on references to them in a kernel.

    def shares(self, work: DecodeWork) -> Shares:
        """Cut the sequence."""
        num_heads, workers = self.num_kv_heads, self.num_workers
        num_rows = work.context_lens.shape[0]
        total = num_heads * work.row_start[num_rows]
        if work.short is None:
            nothing = jnp.int32(0)
            return Shares(self._share(total, workers), nothing, nothing, nothing)
        num_decodes = work.short.num_decodes[0]
        first_short = num_heads * num_decodes
        num_short = num_heads * work.short.num_short[0]
        if self.short_parts == 1:
            return Shares(self._share(total, workers), jnp.int32(0), first_short, num_short)
        of_part = total - num_heads * work.row_start[num_decodes]
        total = total + (self.short_parts - 1) * of_part
        if workers <= self.short_parts:  # no room for gaps
            return Shares(self._share(total, workers), of_part, first_short, num_short)
        # The gaps are less than a share each.
        with_gaps = self._share(total, workers - self.short_parts)
        share = jnp.where(of_part > 0, with_gaps, self._share(total, workers))
        stride = lax.div(of_part + share - 1, share) * share
        return Shares(share, stride, first_short, num_short)

    def pair(self, shares: Shares, number) -> Pair:
        """The pair of a number."""
        heads = jnp.int32(self.num_kv_heads)
        part = jnp.int32(0)
        if self.short_parts > 1:
            # Short pairs are counted through all parts.
            of_short = jnp.maximum(number - shares.first_short, 0)
            part = lax.div(of_short, jnp.maximum(shares.num_short, 1))
            number = number - part * shares.num_short
        return Pair(lax.div(number, heads), lax.rem(number, heads), part)

    def number(self, shares: Shares, pair: Pair):
        """The number of a pair."""
        return pair.row * self.num_kv_heads + pair.head + pair.part * shares.num_short

    def place(self, work: DecodeWork, shares: Shares, pair: Pair):
        """Where the blocks of a pair begin in the sequence, and how many they are."""
        before, after = work.row_start[pair.row], work.row_start[pair.row + 1]
        blocks = after - before
        start = self.num_kv_heads * before + pair.head * blocks + pair.part * shares.stride
        return start, blocks

    def workers(self, work: DecodeWork, shares: Shares, pair: Pair):
        """The first worker that has blocks of a pair, and the one after the last."""
        start, blocks = self.place(work, shares, pair)
        first = lax.div(start, shares.share)
        last = lax.div(start + blocks - 1, shares.share) + 1
        return first, jnp.where(blocks > 0, last, first)

    def item(self, work: DecodeWork, shares: Shares, worker, number) -> DecodeItem:
        """What a worker has of the pair of a number."""
        pair = self.pair(shares, number)
        place, blocks = self.place(work, shares, pair)
        length = work.context_lens[pair.row]
        num_tokens = 1
        if work.short is not None and self.sliding_window is not None:
            starts = work.short.query_starts
            num_tokens = starts[pair.row + 1] - starts[pair.row]
        first_seen, first_key = self.first_keys(length, num_tokens)
        begin = worker * shares.share - place
        stop = jnp.minimum(begin + shares.share, blocks)
        return DecodeItem(
            pair,
            start=first_key + jnp.maximum(begin, 0) * self.block_tokens,
            end=jnp.minimum(first_key + stop * self.block_tokens, length),
            first_seen=first_seen,
        )

    def first_keys(self, length, num_tokens):
        """Of a row of so many keys and tokens: the first key that is seen, and that is loaded."""
        if self.sliding_window is None:
            return jnp.int32(0), jnp.int32(0)
        seen = jnp.maximum(length - (num_tokens - 1) - self.sliding_window, 0)
        return seen, lax.div(seen, jnp.int32(self.load_tokens)) * self.load_tokens

    def _share(self, total, num_workers: int):
        return jnp.maximum(lax.div(total + (num_workers - 1), jnp.int32(num_workers)), 1)


class PrefillTiles(NamedTuple):
    """Consecutive query tokens of the rows that decodes do not take; most keys come first."""

    row: jax.Array  # int32 [W]
    token: jax.Array  # int32 [W]: flat position of the first token
    num_tokens: jax.Array  # int32 [W]: at most the tile size
    position: jax.Array  # int32 [W]: position of the first token in its row's context
    num_tiles: jax.Array  # int32 [1]: the rest are padding
    # None if each token sees itself last.
    end: jax.Array | None  # int32 [W]: position after the last key that a token sees
    # int32 [T + tile size - 1]: position of the last key that each token of the batch sees.
    last_seen: jax.Array | None


def split_decodes(batch: RaggedBatch, split: DecodeSplit) -> DecodeWork:
    """Divide the keys of a batch's decodes and short rows among the workers."""
    num_rows = batch.context_lens.shape[0]
    rows = jnp.arange(num_rows)
    num_taken, num_tokens, short = batch.num_decodes, jnp.ones_like(batch.context_lens), None
    if not batch.decode_only:
        num_taken = num_taken + batch.num_short
        num_tokens = jnp.diff(batch.query_starts)
        short = ShortRows(
            batch.num_decodes[None], jnp.asarray(batch.num_short)[None], batch.query_starts
        )
    lengths = jnp.where(rows < num_taken, batch.context_lens, 0)
    _, first_key = jax.vmap(split.first_keys)(lengths, num_tokens)
    row_start = _sum_before(cdiv_array(lengths - first_key, split.block_tokens))
    nobody = jnp.zeros(0, jnp.int32)
    work = DecodeWork(row_start, batch.context_lens, nobody, nobody, short)
    shares = split.shares(work)

    # The pairs of all parts, in their order; those without blocks have no number.
    blocks = row_start[1:] - row_start[:-1]
    heads = jnp.arange(split.num_kv_heads)
    first = split.num_kv_heads * row_start[:-1, None] + heads * blocks[:, None]
    starts = [jnp.where(blocks[:, None] > 0, first, _NEVER)]
    for part in range(1, 1 if short is None else split.short_parts):
        is_short = (blocks > 0) & (rows >= batch.num_decodes)
        starts.append(jnp.where(is_short[:, None], first + part * shares.stride, _NEVER))
    start = jnp.concatenate(starts).reshape(-1)
    end = start + jnp.tile(jnp.repeat(blocks, split.num_kv_heads), len(starts))
    border = jnp.arange(split.num_workers, dtype=jnp.int32) * shares.share
    return work._replace(
        first_pair=count_at_most(end, border), last_pair=count_below(start, border + shares.share)
    )


def list_items(batch: RaggedBatch, split: DecodeSplit) -> list[list[DecodeItem]]:
    """The items of each worker, in numbers: for tests and models of the kernel."""
    work = _split_decodes(batch, split)
    ranges = zip(work.first_pair.tolist(), work.last_pair.tolist(), strict=True)
    workers, pairs = [], []
    for worker, (first, last) in enumerate(ranges):
        workers += [worker] * (last - first)
        pairs += range(first, last)
    items = _read_items(work, split, _padded(workers), _padded(pairs))
    columns, tree = jax.tree.flatten(jax.device_get(items))
    of_workers = [[] for _ in range(split.num_workers)]
    for worker, *item in zip(workers, *(x.tolist() for x in columns), strict=False):
        of_workers[worker].append(jax.tree.unflatten(tree, item))
    return of_workers


_split_decodes = jax.jit(split_decodes, static_argnames="split")


@functools.partial(jax.jit, static_argnames="split")
def _read_items(work: DecodeWork, split: DecodeSplit, workers, pairs) -> DecodeItem:
    shares = split.shares(work)
    return jax.vmap(lambda worker, pair: split.item(work, shares, worker, pair))(workers, pairs)


def _padded(numbers: list[int]) -> np.ndarray:
    """Of a length that many lists have, so that one program reads their items."""
    return np.pad(np.asarray(numbers, np.int32), (0, -len(numbers) % 128))


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
    found = PrefillTiles(
        row=row[order],
        token=(batch.query_starts[row] + offset)[order],
        num_tokens=jnp.clip(lengths[row] - offset, 0, tile_tokens)[order],
        position=position[order],
        num_tiles=num_tiles[None],
        end=None,
        last_seen=None,
    )
    if batch.last_seen is None:
        return found
    # The last token of a tile sees the most.
    last = jnp.clip(found.token + found.num_tokens - 1, 0, num_tokens - 1)
    return found._replace(
        end=jnp.maximum(found.position + found.num_tokens, batch.last_seen[last] + 1),
        last_seen=jnp.pad(batch.last_seen, (0, tile_tokens - 1)),
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


def _sum_before(x: jax.Array) -> jax.Array:
    """The sum of all numbers before each, and of all."""
    place = jnp.arange(x.size + 1)[:, None]
    return jnp.sum(jnp.where(jnp.arange(x.size) < place, x, 0), axis=1, dtype=jnp.int32)


def running_sum(x: jax.Array) -> jax.Array:
    """The sum of all numbers up to each."""
    place = jnp.arange(x.size)
    return jnp.sum(jnp.where(place <= place[:, None], x, 0), axis=1, dtype=jnp.int32)


def count_below(numbers: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(numbers < x[:, None], axis=1, dtype=jnp.int32)


def count_at_most(numbers: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(numbers <= x[:, None], axis=1, dtype=jnp.int32)

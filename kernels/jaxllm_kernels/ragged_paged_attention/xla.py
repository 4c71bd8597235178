"""The implementation in plain XLA: what CPUs run, and others that have no kernel of their own.

The queries of a row are cut into tiles of consecutive tokens, the keys into chunks of consecutive
blocks, and the pairs (tile, chunk) in which a query sees a key are listed once per step. A loop
with that many iterations takes one pair at a time: it reads the chunk's blocks and folds them into
the running softmax of the tile's tokens. So the cost follows the tokens that are attended to, not
the lengths that are possible, and no score outlives an iteration.

Decodes are tiles of one token, and have a loop to themselves; prefill chunks have larger ones.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxllm_kernels.common import cdiv, from_storage
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    RaggedBatch,
    check_common,
    locate_tokens,
)
from jaxllm_kernels.ragged_paged_attention.pages import pages_shape, write_blocks, write_pages

# The score of a key that is not seen. It is finite, so that a tile may meet such keys alone: their
# weights, all one, are multiplied by exp(_UNSEEN - score) = 0 as soon as a key is seen, and the
# last chunk of a tile shows every token itself.
_UNSEEN = float(jnp.finfo(jnp.float32).min)


class Pairs(NamedTuple):
    """Pairs of a tile of queries and a chunk of keys; arrays [I], or scalars for one of them."""

    token: jax.Array  # int32: flat position of the tile's first token
    num_tokens: jax.Array  # int32: tokens of the tile, at most its size
    position: jax.Array  # int32: position of its first token in the row's context
    first_key: jax.Array  # int32: position of the chunk's first key
    blocks: jax.Array  # int32 [.., blocks of a chunk]: 0 where none of the keys is seen


class Worklist(NamedTuple):
    """The pairs to be processed: the first num_pairs."""

    num_pairs: jax.Array  # int32 []
    pairs: Pairs


class Prepared(NamedTuple):
    """What the layers of a step share."""

    positions: jax.Array  # int32 [T]
    write_blocks: jax.Array  # int32 [T]
    # By sliding window; 0 for none.
    decodes: dict[int, Worklist]
    prefills: dict[int, Worklist]


class Softmax(NamedTuple):
    """Running softmax. A token has G = N // K consecutive lines per kv head, one per query head,
    so that a tile is a contiguous [tile size * G, H] panel of every kv head."""

    largest: jax.Array  # float32 [K, lines]
    total: jax.Array  # float32 [K, lines]
    weighted: jax.Array  # float32 [K, lines, H]


@dataclass(frozen=True)
class XlaBackend:
    """Attention by a loop over pairs of query tiles and key chunks."""

    name: str = "xla"
    # Tokens of a prefill tile, and at least so many keys of a chunk, rounded up to whole blocks.
    tile_size: int = 64
    decode_chunk: int = 64
    prefill_chunk: int = 256

    def check(
        self, config: AttentionConfig, *, block_size: int, dtype: DTypeLike, platform: str
    ) -> None:
        del platform
        check_common(config, block_size=block_size, dtype=dtype)

    def cache_shape(
        self, config: AttentionConfig, *, num_blocks: int, block_size: int, dtype: DTypeLike
    ) -> jax.ShapeDtypeStruct:
        return pages_shape(config, num_blocks=num_blocks, block_size=block_size, dtype=dtype)

    def prepare(
        self, batch: RaggedBatch, configs: tuple[AttentionConfig, ...], *, num_tokens: int
    ) -> Prepared:
        places = locate_tokens(batch, num_tokens)
        windows = {config.sliding_window or 0 for config in configs}
        prefills = {}
        if not batch.decode_only:
            tile_size = self._tile_size(num_tokens)
            prefills = {
                w: _prefill_work(batch, num_tokens, tile_size, self.prefill_chunk, w)
                for w in windows
            }
        return Prepared(
            positions=places.positions,
            write_blocks=write_blocks(batch, places),
            decodes={w: _decode_work(batch, num_tokens, self.decode_chunk, w) for w in windows},
            prefills=prefills,
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
    ) -> tuple[jax.Array, jax.Array]:
        num_tokens, num_heads, head_size = q.shape
        num_kv_heads = config.num_kv_heads
        cache = write_pages(cache, k, v, prepared.write_blocks, prepared.positions)

        # A tile may reach behind the last token.
        tile_size = 1 if batch.decode_only else self._tile_size(num_tokens)
        lines = jnp.pad(q, ((0, tile_size), (0, 0), (0, 0)))
        lines = _split_heads(lines.reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_size))
        shape = lines.shape[:2]
        softmax = Softmax(
            jnp.full(shape, _UNSEEN), jnp.zeros(shape), jnp.zeros(lines.shape, jnp.float32)
        )
        if sinks is not None:
            sink_scores = sinks.reshape(1, num_kv_heads, -1, 1).astype(jnp.float32)
            sink_scores = jnp.broadcast_to(
                sink_scores, (num_tokens + tile_size, *sink_scores.shape[1:])
            )
            softmax = softmax._replace(
                largest=_split_heads(sink_scores)[..., 0], total=jnp.ones(shape)
            )
        window = config.sliding_window or 0
        softmax = _process(softmax, lines, cache, prepared.decodes[window], 1, config)
        if not batch.decode_only:
            work = prepared.prefills[window]
            softmax = _process(softmax, lines, cache, work, tile_size, config)

        # Tokens of padding have zero by tiny, which is zero.
        out = softmax.weighted / jnp.maximum(softmax.total, jnp.finfo(jnp.float32).tiny)[..., None]
        out = out.astype(q.dtype).reshape(num_kv_heads, -1, num_heads // num_kv_heads, head_size)
        return out.swapaxes(0, 1)[:num_tokens].reshape(q.shape), cache

    def _tile_size(self, num_tokens: int) -> int:
        return min(self.tile_size, num_tokens)


def _decode_work(batch: RaggedBatch, num_tokens: int, chunk_size: int, window: int) -> Worklist:
    rows = jnp.arange(min(batch.context_lens.shape[0], num_tokens), dtype=jnp.int32)
    return _list_pairs(
        batch,
        rows=rows,
        tokens=rows,
        num_tokens=(rows < batch.num_decodes).astype(jnp.int32),
        chunk_size=chunk_size,
        window=window,
    )


def _prefill_work(
    batch: RaggedBatch, num_tokens: int, tile_size: int, chunk_size: int, window: int
) -> Worklist:
    num_rows = batch.context_lens.shape[0]
    lengths = jnp.diff(batch.query_starts)
    lengths = jnp.where(jnp.arange(num_rows) < batch.num_decodes, 0, lengths)
    max_tiles = num_tokens // tile_size + min(num_rows, num_tokens)
    rows, ranks, _ = _spread(-(-lengths // tile_size), max_tiles)
    return _list_pairs(
        batch,
        rows=rows,
        tokens=batch.query_starts[rows] + ranks * tile_size,
        num_tokens=jnp.clip(lengths[rows] - ranks * tile_size, 0, tile_size),
        chunk_size=chunk_size,
        window=window,
    )


def _list_pairs(
    batch: RaggedBatch,
    *,
    rows: jax.Array,
    tokens: jax.Array,
    num_tokens: jax.Array,
    chunk_size: int,
    window: int,
) -> Worklist:
    """List the chunks of every tile, given by row, first flat token and number of tokens."""
    max_blocks = batch.block_tables.shape[1]
    chunk_blocks = min(cdiv(chunk_size, batch.block_size), max_blocks)
    chunk_size = chunk_blocks * batch.block_size

    positions = batch.context_lens[rows] - (batch.query_starts[rows + 1] - tokens)
    ends = positions + num_tokens
    starts = jnp.maximum(positions - window + 1, 0) if window else jnp.zeros_like(ends)
    num_chunks = jnp.where(num_tokens > 0, -(-ends // chunk_size) - starts // chunk_size, 0)
    max_pairs = rows.shape[0] * cdiv(max_blocks, chunk_blocks)
    tiles, ranks, num_pairs = _spread(num_chunks, max_pairs)

    chunks = starts[tiles] // chunk_size + ranks
    columns = chunks[:, None] * chunk_blocks + jnp.arange(chunk_blocks, dtype=jnp.int32)
    first_keys = columns * batch.block_size
    is_read = (first_keys < ends[tiles, None]) & (
        first_keys + batch.block_size > starts[tiles, None]
    )
    blocks = batch.block_tables[rows[tiles, None], jnp.clip(columns, 0, max_blocks - 1)]
    return Worklist(
        num_pairs,
        Pairs(
            token=tokens[tiles],
            num_tokens=num_tokens[tiles],
            position=positions[tiles],
            first_key=first_keys[:, 0],
            blocks=jnp.where(is_read, blocks, 0),
        ),
    )


def _spread(counts: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lay out counts[i] places for every i in turn.

    Returns, of each of `size` places, its owner i and its rank among the owner's places (in range
    and garbage past the last one), and the number of places.
    """
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    places = jnp.arange(size, dtype=jnp.int32)
    owners = jnp.searchsorted(ends, places, side="right").astype(jnp.int32)
    owners = jnp.minimum(owners, counts.shape[0] - 1)
    return owners, places - (ends - counts)[owners], ends[-1]


def _split_heads(x: jax.Array) -> jax.Array:
    """[T, K, G, H] to lines [K, T * G, H]."""
    num_tokens, num_kv_heads, group_size, head_size = x.shape
    return x.swapaxes(0, 1).reshape(num_kv_heads, num_tokens * group_size, head_size)


def _process(
    softmax: Softmax,
    q: jax.Array,
    cache: jax.Array,
    work: Worklist,
    tile_size: int,
    config: AttentionConfig,
) -> Softmax:
    """Fold the pairs of a worklist into the softmax of the queries q [K, lines, H]."""

    def body(i: jax.Array, softmax: Softmax) -> Softmax:
        pair = jax.tree.map(lambda x: x[i], work.pairs)
        return _process_pair(softmax, q, cache, pair, tile_size, config)

    return lax.fori_loop(0, work.num_pairs, body, softmax)


def _process_pair(
    softmax: Softmax,
    q: jax.Array,
    cache: jax.Array,
    pair: Pairs,
    tile_size: int,
    config: AttentionConfig,
) -> Softmax:
    num_kv_heads, _, head_size = q.shape
    group_size = config.num_heads // num_kv_heads
    first_line, num_lines = pair.token * group_size, tile_size * group_size

    q = lax.dynamic_slice_in_dim(q, first_line, num_lines, axis=1)
    pages = from_storage(cache.at[pair.blocks].get(mode="clip"), q.dtype)
    kv = jnp.moveaxis(pages, 0, 2).reshape(2, num_kv_heads, -1, head_size)
    if tile_size == 1:
        # Products of a few lines are bound by memory; 16-bit ones have slow paths on CPUs.
        q, kv = q.astype(jnp.float32), kv.astype(jnp.float32)
    precision = "highest" if kv.dtype == jnp.float32 else None

    tokens = jnp.arange(num_lines, dtype=jnp.int32)[:, None] // group_size
    positions = pair.position + tokens
    keys = pair.first_key + jnp.arange(kv.shape[2], dtype=jnp.int32)
    is_seen = keys <= positions
    is_seen_by_tile = keys < pair.position + pair.num_tokens
    if config.sliding_window is not None:
        is_seen &= keys > positions - config.sliding_window
        is_seen_by_tile &= keys > pair.position - config.sliding_window

    # Batched products keep the batch in front: XLA:CPU runs 16-bit ones in no other form.
    scores = config.scale * jnp.einsum(
        "klh,kch->klc", q, kv[0], precision=precision, preferred_element_type=jnp.float32
    )
    if config.soft_cap is not None:
        scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
    # This also replaces what came of the garbage behind a context.
    scores = jnp.where(is_seen, scores, _UNSEEN)

    old = Softmax(*(lax.dynamic_slice_in_dim(x, first_line, num_lines, axis=1) for x in softmax))
    largest = jnp.maximum(old.largest, scores.max(axis=-1))
    weights = jnp.exp(scores - largest[..., None])
    # A weight of zero does not silence a NaN.
    values = jnp.where(is_seen_by_tile[:, None], kv[1], 0)
    weighted = jnp.einsum(
        "klc,kch->klh",
        weights.astype(values.dtype),
        values,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    decay = jnp.exp(old.largest - largest)
    new = Softmax(
        largest,
        old.total * decay + weights.sum(axis=-1),
        old.weighted * decay[..., None] + weighted,
    )
    if tile_size > 1:
        # The tile may reach into the tokens of the next row.
        is_tile = tokens < pair.num_tokens
        new = Softmax(
            jnp.where(is_tile[:, 0], new.largest, old.largest),
            jnp.where(is_tile[:, 0], new.total, old.total),
            jnp.where(is_tile, new.weighted, old.weighted),
        )
    return Softmax(
        *(
            lax.dynamic_update_slice_in_dim(x, y, first_line, axis=1)
            for x, y in zip(softmax, new, strict=True)
        )
    )

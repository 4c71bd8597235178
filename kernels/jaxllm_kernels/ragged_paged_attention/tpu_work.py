"""The worklists of a call of the TPU kernel, which its scalar core reads."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm_kernels.common import cdiv, round_up
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch, locate_tokens


class Work(NamedTuple):
    """The segments of a call in the order of its steps."""

    # Step i has the segments [first_segments[i], first_segments[i + 1]).
    first_segments: jax.Array  # int32 [steps + 1]
    rows: jax.Array  # int32 [segments], like the others
    tokens: jax.Array  # flat position of the first token
    lengths: jax.Array  # tokens
    positions: jax.Array  # of the first token, in the row's context
    block_tables: jax.Array  # int32 [R * P]
    # int32 [1]: the first segments are decodes, if others are short rows.
    num_decodes: jax.Array | None = None
    # The position after the last key of a segment, if a token may see later ones.
    ends: jax.Array | None = None


def decode_work(batch: RaggedBatch, step: int, num_cores: int) -> Work:
    """The work of the decodes of a decode_only batch: segment i is row i and token i. All cores get
    equally many steps."""
    index = jnp.arange(batch.context_lens.shape[0], dtype=jnp.int32)
    num_steps = round_up(cdiv(len(index), step), num_cores)
    steps = jnp.arange(num_steps + 1, dtype=jnp.int32)
    return Work(
        first_segments=jnp.minimum(steps * step, batch.num_decodes),
        rows=index,
        tokens=index,
        lengths=jnp.ones_like(index),
        positions=batch.context_lens - 1,
        block_tables=batch.block_tables.reshape(-1),
    )


class ShortWork(NamedTuple):
    """The work of decodes and short rows, which are the first tokens of a batch."""

    work: Work
    num_tokens: jax.Array  # int32 []
    num_steps: jax.Array  # int32 []: that have segments; at least one


def short_work(batch: RaggedBatch, num_tokens: int, step: int, num_cores: int) -> ShortWork:
    """The work of decodes and short rows.

    Segment i is row i, whole, in the step of its first token. Cut at steps, a row would be read
    twice, and its second part would have to wait until the first one is written.
    """
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    num_rows = min(batch.context_lens.shape[0], num_tokens)
    num_steps = round_up(cdiv(num_tokens, step), num_cores)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    tokens, lengths = starts[:num_rows], (ends - starts)[:num_rows]
    num_segments = batch.num_decodes + batch.num_short
    is_ours = rows < num_segments
    first_segments = jnp.searchsorted(
        jnp.where(is_ours, tokens, num_tokens),
        jnp.arange(num_steps + 1, dtype=jnp.int32) * step,
        method="compare_all",
    ).astype(jnp.int32)
    # Rows of other kernels are after the last step.
    first_segments = jnp.minimum(first_segments, num_segments)
    work = Work(
        first_segments=first_segments,
        rows=rows,
        tokens=tokens,
        lengths=lengths,
        positions=batch.context_lens[:num_rows] - lengths,
        block_tables=batch.block_tables.reshape(-1),
        num_decodes=batch.num_decodes[None],
    )
    used_steps = (first_segments < first_segments[-1]).sum(dtype=jnp.int32)
    return ShortWork(work, batch.query_starts[num_segments], jnp.maximum(used_steps, 1))


class WrittenWork(NamedTuple):
    """Segments that are written by themselves, before or without their attention."""

    work: Work
    num_steps: jax.Array  # int32 []: up to the last one that has segments; at least one

    @classmethod
    def of(cls, work: Work) -> "WrittenWork":
        used_steps = (work.first_segments < work.first_segments[-1]).sum(dtype=jnp.int32)
        return cls(work, jnp.maximum(used_steps, 1))


class AheadWork(NamedTuple):
    """What prefills have beside their work if tokens see later ones."""

    # int32 [tiles, tile]: how far ahead each token of the flat batch sees.
    distances: jax.Array
    # The segments that an earlier segment of their row sees.
    seen: WrittenWork


def ahead_work(batch: RaggedBatch, work: Work, num_tokens: int, tile: int) -> AheadWork:
    """What the prefills of this work have beside it."""
    assert batch.last_seen is not None and work.ends is not None
    num_tiles = cdiv(num_tokens, tile)
    distances = batch.last_seen - locate_tokens(batch, num_tokens).positions
    distances = jnp.pad(distances, (0, num_tiles * tile - num_tokens)).reshape(num_tiles, tile)

    segments = jnp.arange(len(work.rows), dtype=jnp.int32)
    before = jnp.maximum(segments - 1, 0)
    is_seen = (segments > 0) & (segments < work.first_segments[-1])
    is_seen &= work.rows == work.rows[before]
    is_seen &= work.ends[before] > work.positions
    order = jnp.argsort(~is_seen, stable=True)
    tiles = jnp.where(is_seen, work.tokens // tile, num_tiles)[order]
    first_segments = jnp.searchsorted(
        tiles, jnp.arange(num_tiles + 1, dtype=jnp.int32), method="compare_all"
    ).astype(jnp.int32)
    seen = work._replace(
        first_segments=first_segments,
        rows=work.rows[order],
        tokens=work.tokens[order],
        lengths=work.lengths[order],
        positions=work.positions[order],
        ends=None,
    )
    return AheadWork(distances, WrittenWork.of(seen))


def prefill_work(
    batch: RaggedBatch, num_tokens: int, tile: int, which: jax.Array | None = None
) -> Work:
    """The work of all other rows, or of those that `which` says, bool [R], cut at the tiles of the
    flat batch."""
    num_rows, num_tiles = batch.context_lens.shape[0], cdiv(num_tokens, tile)
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    first_row = batch.num_decodes + batch.num_short
    is_prefill = (ends > starts) & (jnp.arange(num_rows) >= first_row)
    if which is not None:
        is_prefill &= which
    pieces = jnp.where(is_prefill, (ends - 1) // tile - starts // tile + 1, 0)
    ends_of_pieces = jnp.cumsum(pieces, dtype=jnp.int32)

    segments = jnp.arange(num_tiles + min(num_rows, num_tokens), dtype=jnp.int32)
    rows = jnp.searchsorted(ends_of_pieces, segments, side="right", method="compare_all")
    rows = jnp.minimum(rows.astype(jnp.int32), num_rows - 1)
    piece = segments - (ends_of_pieces[rows] - pieces[rows])
    tiles = starts[rows] // tile + piece
    tokens = jnp.maximum(starts[rows], tiles * tile)
    is_real = segments < ends_of_pieces[-1]
    work = Work(
        first_segments=jnp.searchsorted(
            jnp.where(is_real, tiles, num_tiles),
            jnp.arange(num_tiles + 1, dtype=jnp.int32),
            method="compare_all",
        ).astype(jnp.int32),
        rows=rows,
        tokens=tokens,
        lengths=jnp.minimum(ends[rows], (tiles + 1) * tile) - tokens,
        positions=batch.context_lens[rows] - (ends[rows] - tokens),
        block_tables=batch.block_tables.reshape(-1),
    )
    if batch.last_seen is None:
        return work
    # A segment's last token sees the most.
    last = jnp.clip(work.tokens + work.lengths - 1, 0, num_tokens - 1)
    own = work.positions + work.lengths
    return work._replace(ends=jnp.maximum(own, batch.last_seen[last] + 1))

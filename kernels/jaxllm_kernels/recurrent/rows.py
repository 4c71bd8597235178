"""The rows of a step, for ops that keep a state for each request in place of keys and values.

A state is an array [S, ...] with a place, a *slot*, for each running request. A row begins with the
state that its request's last row has left, or with zeros if its first token is the first of its
request: so nothing need clear a slot that passes to another request. A row leaves its state in its
slot, and no other slot is touched.

The last tokens of a row may be drafts, which may turn out to be wrong. Such a row is computed token
by token. It leaves the state before its first draft. When the step knows how many drafts are right,
it computes the states of these once more, from the operands that it has kept of the drafts
(`rows_of_drafts`). So a draft costs the bytes of its operands, and not those of a state.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch, locate_tokens
from jaxllm_kernels.ragged_paged_attention.tiles import Tile, cut_tiles

# The tokens of a tile. Rows that are not decodes are cut into tiles from their first token on. The
# last tile of a row may be shorter; it is computed as if it were whole.
TILE = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StateRows:
    """The rows of one step; `prepare_rows` makes them, once for all layers."""

    # int32 [R]; out of range, for scatters that drop, if the row has no tokens
    slots: jax.Array
    begins: jax.Array  # bool [R]: whether the row's first token is the first of its request
    num_decodes: jax.Array  # int32 []: these rows come first, with one token at the row's place
    query_starts: jax.Array  # int32 [R + 1]; row r has the tokens from query_starts[r] on
    lengths: jax.Array  # int32 [R]: the tokens of each row
    # Of each token: its row, in range for padding, too, and its place in the row.
    token_rows: jax.Array  # int32 [T]
    offsets: jax.Array  # int32 [T]
    # The tiles of rows that are not decodes, in the order of their tokens; None if there are only
    # decodes.
    tiles: Tile | None
    num_tiles: jax.Array  # int32 []
    decode_only: bool = field(metadata={"static": True})
    drafts: "DraftRows | None" = None  # None: no row can have drafts

    @property
    def num_kept(self) -> jax.Array:
        """int32 [R]: the state that a row leaves is that after so many of its tokens."""
        return self.lengths if self.drafts is None else self.drafts.num_kept


class DraftRows(NamedTuple):
    """The rows of a step that have drafts: M of them at most."""

    rows: jax.Array  # int32 [M]; those past the last are R
    num_rows: jax.Array  # int32 []: how many of them have drafts
    num_kept: jax.Array  # int32 [R]: as `StateRows.num_kept`
    # int32 [M * k]: where the drafts of each of the rows are in the step, with k places for each;
    # past the drafts of a row they are any tokens.
    tokens: jax.Array


def prepare_rows(
    batch: RaggedBatch,
    slots: jax.Array,
    *,
    num_tokens: int,
    num_slots: int,
    num_drafts: jax.Array | None = None,
    most_drafts: tuple[int, int] = (0, 0),
) -> StateRows:
    """Compute once per step what all layers with states share.

    Args:
      batch: its block tables are not read.
      slots: int32 [R], the slot of each row. Of rows without tokens they may be anything.
      num_drafts: int32 [R], how many of each row's last tokens are drafts; not all of them.
      most_drafts: how many rows have drafts at most, and how many each of them has.
    """
    lengths = jnp.diff(batch.query_starts)
    has_tokens = lengths > 0
    # Not -1, which is the last slot.
    slots = jnp.where(has_tokens & (slots >= 0) & (slots < num_slots), slots, num_slots)
    places = locate_tokens(batch, num_tokens)
    drafts, in_tiles = None, lengths
    if num_drafts is not None:
        drafts = _find_drafts(batch.query_starts, lengths, num_drafts, *most_drafts)
        in_tiles = jnp.where(num_drafts > 0, 0, lengths)
    tiles, num_tiles = (
        (None, jnp.int32(0)) if batch.decode_only else cut_tiles(batch, num_tokens, TILE, in_tiles)
    )
    return StateRows(
        slots=slots.astype(jnp.int32),
        begins=has_tokens & (batch.context_lens == lengths),
        num_decodes=batch.num_decodes,
        query_starts=batch.query_starts,
        lengths=lengths,
        token_rows=places.rows,
        offsets=jnp.arange(num_tokens, dtype=jnp.int32) - batch.query_starts[places.rows],
        tiles=tiles,
        num_tiles=num_tiles,
        decode_only=batch.decode_only,
        drafts=drafts,
    )


def rows_of_drafts(slots: jax.Array, num_right: jax.Array, num_drafts: int) -> StateRows:
    """The rows that let states go on over the drafts that are right.

    Args:
      slots: int32 [M], those of the rows with drafts; of other rows they are out of range.
      num_right: int32 [M], how many of a row's drafts are right; 0 for other rows.
      num_drafts: the places that each row has. The operands of its drafts are in the first ones.
    """
    num_rows = len(slots)
    places = jnp.arange(num_rows * num_drafts, dtype=jnp.int32)
    (rows,) = jnp.nonzero(num_right > 0, size=num_rows, fill_value=num_rows)
    return StateRows(
        slots=slots,
        begins=jnp.zeros(num_rows, bool),
        num_decodes=jnp.int32(0),
        query_starts=jnp.arange(num_rows + 1, dtype=jnp.int32) * num_drafts,
        lengths=num_right,
        token_rows=places // num_drafts,
        offsets=places % num_drafts,
        tiles=None,
        num_tiles=jnp.int32(0),
        decode_only=False,
        drafts=DraftRows(
            rows=rows.astype(jnp.int32),
            num_rows=jnp.sum(num_right > 0, dtype=jnp.int32),
            num_kept=num_right,
            tokens=places,
        ),
    )


def _find_drafts(
    query_starts: jax.Array,
    lengths: jax.Array,
    num_drafts: jax.Array,
    most_rows: int,
    most_of_row: int,
) -> DraftRows:
    (rows,) = jnp.nonzero(num_drafts > 0, size=most_rows, fill_value=len(num_drafts))
    firsts = (query_starts[1:] - num_drafts).at[rows].get(mode="clip")
    return DraftRows(
        rows=rows.astype(jnp.int32),
        num_rows=jnp.sum(num_drafts > 0, dtype=jnp.int32),
        num_kept=lengths - num_drafts,
        tokens=(firsts[:, None] + jnp.arange(most_of_row)).reshape(-1).astype(jnp.int32),
    )

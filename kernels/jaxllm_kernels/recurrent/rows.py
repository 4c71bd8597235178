"""The rows of a step, for ops that keep a state for each request in place of keys and values.

A state is an array [S, ...] with a place, a *slot*, for each running request. A row begins with the
state that its request's last row has left, or with zeros if its first token is the first of its
request: so nothing need clear a slot that passes to another request. A row leaves its state in its
slot, and no other slot is touched.
"""

from dataclasses import dataclass, field

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
    # Of each token: its row, in range for padding, too, and its place in the row.
    token_rows: jax.Array  # int32 [T]
    offsets: jax.Array  # int32 [T]
    # The tiles of rows that are not decodes, in the order of their tokens; None if there are only
    # decodes.
    tiles: Tile | None
    num_tiles: jax.Array  # int32 []
    decode_only: bool = field(metadata={"static": True})

    @property
    def lengths(self) -> jax.Array:
        """The tokens of each row."""
        return jnp.diff(self.query_starts)


def prepare_rows(
    batch: RaggedBatch, slots: jax.Array, *, num_tokens: int, num_slots: int
) -> StateRows:
    """Compute once per step what all layers with states share.

    Args:
      batch: its block tables are not read.
      slots: int32 [R], the slot of each row. Of rows without tokens they may be anything.
    """
    lengths = jnp.diff(batch.query_starts)
    has_tokens = lengths > 0
    # Not -1, which is the last slot.
    slots = jnp.where(has_tokens & (slots >= 0) & (slots < num_slots), slots, num_slots)
    places = locate_tokens(batch, num_tokens)
    tiles, num_tiles = (
        (None, jnp.int32(0)) if batch.decode_only else cut_tiles(batch, num_tokens, TILE)
    )
    return StateRows(
        slots=slots.astype(jnp.int32),
        begins=has_tokens & (batch.context_lens == lengths),
        num_decodes=batch.num_decodes,
        query_starts=batch.query_starts,
        token_rows=places.rows,
        offsets=jnp.arange(num_tokens, dtype=jnp.int32) - batch.query_starts[places.rows],
        tiles=tiles,
        num_tiles=num_tiles,
        decode_only=batch.decode_only,
    )

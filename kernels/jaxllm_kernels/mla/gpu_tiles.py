"""The work of latent attention on Hopper GPUs, divided on the device once per step for all layers.

A *line* is a token and a query head. Lines of a token follow each other in the flat batch, and so
do those of a row, so any lines of a row can be the rows of a matrix instruction: heads of one
token, or of several. All lines of a row attend to the same cached rows. So decodes, short rows and
chunks differ in their number of lines and in nothing else, and one kernel computes them all.

A *tile* is some lines of a row, and what the last of them sees. A *team* of thread blocks computes
it, LINES of it in each, of the same blocks of cached rows: one of them finds in L2 what another has
read. A team has one thread block, or as many as the heads of a token need.

The blocks of all tiles are one sequence, which is cut into equal shares, one for each team. So no
team has more than a block above the average, whatever the batch, and at most one tile is cut at
each border. A tile costs something besides its blocks: it has a place in front of them, of the
blocks in whose time queries are loaded and outputs are stored.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm_kernels.common import cdiv, round_up
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch, fresh_rows
from jaxllm_kernels.ragged_paged_attention.gpu_worklist import (
    cdiv_array,
    count_at_most,
    count_below,
    running_sum,
)

LINES = 64  # of a thread block: the rows of a matrix instruction
BLOCK = 64  # cached rows that are loaded at a time

# What a tile costs besides its blocks, in blocks.
FRONT = 1

# Up to so many tiles all pairs of them are compared; a scan of more numbers costs less.
_MOST_COMPARED = 1024


class Teams(NamedTuple):
    """The static sizes of a division of work."""

    heads: int  # lines per token: a multiple of 8, which is what copies of lines need
    size: int  # thread blocks of a team
    number: int

    @property
    def lines(self) -> int:
        """The lines of a tile."""
        return self.size * LINES

    @classmethod
    def of(cls, num_heads: int, num_workers: int) -> "Teams":
        """The teams of a number of thread blocks, for a number of query heads."""
        heads = round_up(num_heads, 8)
        size = cdiv(heads, LINES)
        return cls(heads, size, max(num_workers // size, 1))


class Tiles(NamedTuple):
    """The tiles of a step, in the sequence of their blocks. Those of padding have no blocks."""

    row: jax.Array  # int32 [W]
    line: jax.Array  # int32 [W]: the first one, in the flat batch
    num_lines: jax.Array  # int32 [W]
    shift: jax.Array  # int32 [W]: the position of a token less its place in the flat batch
    end: jax.Array  # int32 [W]: how many cached rows the last line sees
    start: jax.Array  # int32 [W]: in the sequence; FRONT places later its blocks begin
    # Team t has the places from t * share on. It has blocks of the tiles [first_tile[t],
    # last_tile[t]), and of each at least one.
    share: jax.Array  # int32 [1]
    first_tile: jax.Array  # int32 [teams]
    last_tile: jax.Array  # int32 [teams]


def cut_tiles(batch: RaggedBatch, teams: Teams, *, num_tokens: int, fewest_fresh: int = 0) -> Tiles:
    """Cut a batch's lines into tiles, and divide their blocks among the teams. Fresh rows have no
    tiles."""
    num_rows = batch.context_lens.shape[0]
    if batch.decode_only:
        row = jnp.arange(num_rows, dtype=jnp.int32)
        is_real = row < batch.num_decodes
        line = row * teams.heads
        num_lines = jnp.where(is_real, teams.heads, 0)
        shift = batch.context_lens - 1 - row
        end = jnp.where(is_real, batch.context_lens, 0)
    else:
        first = batch.query_starts[:-1]
        row_lines = jnp.diff(batch.query_starts) * teams.heads
        row_lines = jnp.where(fresh_rows(batch, fewest_fresh), 0, row_lines)
        row_tiles = cdiv_array(row_lines, teams.lines)
        row_end = running_sum(row_tiles)
        most = cdiv(num_tokens * teams.heads, teams.lines) + min(num_rows, num_tokens)
        tile = jnp.arange(most, dtype=jnp.int32)
        row = jnp.minimum(count_at_most(row_end, tile), num_rows - 1)
        before = (tile - (row_end - row_tiles)[row]) * teams.lines
        line = first[row] * teams.heads + before
        num_lines = jnp.clip(row_lines[row] - before, 0, teams.lines)
        shift = (batch.context_lens - batch.query_starts[1:])[row]
        last_token = (line + num_lines - 1) // teams.heads
        end = jnp.where(num_lines > 0, last_token + shift + 1, 0)
    blocks = cdiv_array(end, BLOCK)
    places = jnp.where(blocks > 0, blocks + FRONT, 0)
    summed = running_sum(places) if places.size <= _MOST_COMPARED else jnp.cumsum(places)
    place_end = summed.astype(jnp.int32)
    start = place_end - places
    total = place_end[-1:]
    share = jnp.maximum(cdiv_array(total, teams.number), 1)
    border = jnp.arange(teams.number, dtype=jnp.int32) * share
    return Tiles(
        row=row,
        line=line,
        num_lines=num_lines,
        shift=shift,
        end=end,
        start=start,
        share=share,
        first_tile=count_at_most(place_end, border),
        last_tile=count_below(start + FRONT, jnp.minimum(border + share, total)),
    )

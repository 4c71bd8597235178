"""Carries states through the rows of a step: one recurrent step for each decode and for each token
of a row with drafts, one chunk for each tile of the other rows.

The batch determines the number of iterations, so padding costs none. A row's tiles follow each
other, and each one takes the state that the last one has left in the row's slot. A CPU takes one
decode per iteration, whose state then stays in its cache; an accelerator takes many. What a tile
computes without its state, most of it, does not wait for the tile before it: an accelerator does so
for many tiles at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.tiles import Tile
from jaxllm_kernels.recurrent.rows import TILE, DraftRows, StateRows

# Decodes per iteration on accelerators. Their states are gathered: of Qwen3-Next they are 2 MiB
# each in a layer.
_DECODES_AT_ONCE = 32
# Tiles for which accelerators compute at once what needs no state.
_TILES_AT_ONCE = 8

# States [S, ...] and outputs [T, ...].
_Carried = tuple[jax.Array, jax.Array]


class Advance(Protocol):
    """A row's state and the operands of a token, or what was prepared of a tile, to the state after
    them and the output, or outputs [TILE, ...]."""

    def __call__(self, state: jax.Array, operands: Any, /) -> tuple[jax.Array, jax.Array]: ...


@dataclass(frozen=True)
class Chunk:
    """How a tile is computed. The operands past its tokens are zeros, which must leave the state as
    it is."""

    # From operands [TILE, ...] to what the tile needs of them beside its state.
    prepare: Callable[[Any], Any]
    advance: Advance


class Decodes(Protocol):
    """Computes the decodes of a step: their outputs [up to T, ...], which of other rows may be
    anything, and the states [S, ...]."""

    def __call__(
        self, operands: Any, state: jax.Array, rows: StateRows
    ) -> tuple[jax.Array, jax.Array]: ...


class Tiles(Protocol):
    """Computes the tiles of a step: the states [S, ...], and the outputs [T, ...] of other rows
    with those of the tiles among them."""

    def __call__(
        self, operands: Any, out: jax.Array, state: jax.Array, rows: StateRows
    ) -> _Carried: ...


class AtOnce(NamedTuple):
    """How much an iteration takes."""

    decodes: int = 1
    tiles: int = 1  # They are prepared together, and then computed one by one.

    @classmethod
    def on(cls, chip: Chip) -> "AtOnce":
        """What is best on a chip."""
        return cls() if chip.platform == "cpu" else cls(_DECODES_AT_ONCE, _TILES_AT_ONCE)


def scan_rows(
    step: Advance,
    chunk: Chunk,
    operands: Any,
    state: jax.Array,
    rows: StateRows,
    *,
    out_shape: tuple[int, ...],
    at_once: AtOnce,
    decodes: Decodes | None = None,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute all rows; return the outputs, float32 [T, *out_shape], and the states [S, ...].

    `step` computes a decode, `chunk` a tile. `operands` is a tree of arrays [T, ...]. `decodes`
    computes all decodes in place of a loop, and `tiles` all tiles.
    """
    num_tokens = len(rows.token_rows)
    of_tokens = operands
    # If the tiles run here, there is room for the last tile, which may extend past the last token.
    beside = TILE - 1 if tiles is None and rows.tiles is not None else 0
    operands = jax.tree.map(lambda x: _pad_rows(x, beside), operands)
    out = jnp.zeros((num_tokens + beside, *out_shape), jnp.float32)
    num_decodes = min(at_once.decodes, num_tokens, len(rows.slots))
    if decodes is None:
        carried = _run_decodes(step, operands, (state, out), rows, num_decodes)
    else:
        y, state = decodes(of_tokens, state, rows)
        is_decode = jnp.arange(len(y)) < rows.num_decodes
        # Not by `at[:n].set`. Of a whole array it is a scatter with an array of no indices, and the
        # compiler of JAX 0.11.2 crashes on an array without elements in a shard_map.
        y = jnp.where(_beside(is_decode, y), y, 0)
        carried = state, lax.dynamic_update_slice_in_dim(out, y, 0, axis=0)
    if rows.tiles is not None and tiles is not None:
        state, out = carried
        carried = tiles(of_tokens, out, state, rows)
    elif rows.tiles is not None:
        carried = _run_tiles(chunk, operands, carried, rows, rows.tiles, at_once.tiles)
    if rows.drafts is not None:
        # Behind the tiles, which write past their tokens.
        carried = _run_drafts(step, operands, carried, rows, rows.drafts, num_decodes)
    state, out = carried
    return out[:num_tokens], state


def _run_decodes(
    step: Advance, operands: Any, carried: _Carried, rows: StateRows, at_once: int
) -> _Carried:
    def run_one(i: jax.Array, carried: _Carried) -> _Carried:
        states, out = carried
        slot = rows.slots[i]
        state = _read(states, slot, rows.begins[i])
        state, y = step(state, jax.tree.map(lambda x: x[i], operands))
        states = lax.dynamic_update_index_in_dim(states, state, slot, 0)
        return states, lax.dynamic_update_index_in_dim(out, y, i, 0)

    def run_some(i: jax.Array, carried: _Carried) -> _Carried:
        states, out = carried
        places = i * at_once + jnp.arange(at_once, dtype=jnp.int32)
        is_decode = places < rows.num_decodes
        slots = jnp.where(is_decode, rows.slots.at[places].get(mode="clip"), len(states))
        state = states.at[slots].get(mode="clip")
        # A select also replaces NaN.
        begins = rows.begins.at[places].get(mode="clip")
        state = jnp.where(_beside(begins, state), 0, state)
        its = jax.tree.map(lambda x: x.at[places].get(mode="clip"), operands)
        state, y = jax.vmap(step)(state, its)
        states = states.at[slots].set(state, mode="drop")
        return states, out.at[jnp.where(is_decode, places, len(out))].set(y, mode="drop")

    if at_once == 1:
        return lax.fori_loop(0, rows.num_decodes, run_one, carried)
    return lax.fori_loop(0, -(-rows.num_decodes // at_once), run_some, carried)


def _run_tiles(
    chunk: Chunk, operands: Any, carried: _Carried, rows: StateRows, tiles: Tile, at_once: int
) -> _Carried:
    def prepare(token: jax.Array, num_tokens: jax.Array) -> Any:
        # Tokens of the next row, and garbage, become zeros.
        is_there = jnp.arange(TILE) < num_tokens

        def cut(x: jax.Array) -> jax.Array:
            return jnp.where(_beside(is_there, x), lax.dynamic_slice_in_dim(x, token, TILE), 0)

        return chunk.prepare(jax.tree.map(cut, operands))

    def advance(i: jax.Array, prepared: Any, carried: _Carried) -> _Carried:
        states, out = carried
        row, token = tiles.row[i], tiles.token[i]
        slot = rows.slots[row]
        state = _read(states, slot, rows.begins[row] & (token == rows.query_starts[row]))
        state, y = chunk.advance(state, prepared)
        states = lax.dynamic_update_index_in_dim(states, state, slot, 0)
        # The outputs past the tile's tokens have the places of tokens that come later.
        return states, lax.dynamic_update_slice_in_dim(out, y, token, axis=0)

    def run_one(i: jax.Array, carried: _Carried) -> _Carried:
        return advance(i, prepare(tiles.token[i], tiles.num_tokens[i]), carried)

    def run_some(i: jax.Array, carried: _Carried) -> _Carried:
        first = i * at_once
        places = first + jnp.arange(at_once, dtype=jnp.int32)
        # Places past the last tile have no tokens: zeros are prepared, which nothing uses.
        prepared = jax.vmap(prepare)(
            *(x.at[places].get(mode="clip") for x in (tiles.token, tiles.num_tokens))
        )

        def run_prepared(j: jax.Array, carried: _Carried) -> _Carried:
            tile = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, j, keepdims=False), prepared)
            return advance(first + j, tile, carried)

        return lax.fori_loop(0, jnp.minimum(rows.num_tiles - first, at_once), run_prepared, carried)

    at_once = min(at_once, len(tiles.row))
    if at_once == 1:
        return lax.fori_loop(0, rows.num_tiles, run_one, carried)
    return lax.fori_loop(0, -(-rows.num_tiles // at_once), run_some, carried)


def _run_drafts(
    step: Advance,
    operands: Any,
    carried: _Carried,
    rows: StateRows,
    drafts: DraftRows,
    at_once: int,
) -> _Carried:
    """Compute the rows with drafts token by token. The drafts leave no state."""

    def run_one(i: jax.Array, carried: _Carried) -> _Carried:
        states, out = carried
        row = drafts.rows[i]
        slot, first, num_kept = rows.slots[row], rows.query_starts[row], drafts.num_kept[row]

        def advance(j: jax.Array, its: _Carried) -> _Carried:
            state, out = its
            state, y = step(state, jax.tree.map(lambda x: x[first + j], operands))
            return state, lax.dynamic_update_index_in_dim(out, y, first + j, 0)

        state = _read(states, slot, rows.begins[row])
        state, out = lax.fori_loop(0, num_kept, advance, (state, out))
        states = lax.dynamic_update_index_in_dim(states, state, slot, 0)
        _, out = lax.fori_loop(num_kept, rows.lengths[row], advance, (state, out))
        return states, out

    def run_some(i: jax.Array, carried: _Carried) -> _Carried:
        states, out = carried
        places = i * at_once + jnp.arange(at_once, dtype=jnp.int32)
        is_there = places < drafts.num_rows
        its = drafts.rows.at[places].get(mode="clip")
        slots, firsts, num_kept, lengths = (
            x.at[its].get(mode="clip")
            for x in (rows.slots, rows.query_starts[:-1], drafts.num_kept, rows.lengths)
        )
        slots = jnp.where(is_there, slots, len(states))
        num_kept, lengths = (jnp.where(is_there, x, 0) for x in (num_kept, lengths))

        def advance(ends: jax.Array, begins: jax.Array):
            def one(j: jax.Array, carried: _Carried) -> _Carried:
                state, out = carried
                runs, tokens = begins + j < ends, firsts + begins + j
                of_tokens = jax.tree.map(lambda x: x.at[tokens].get(mode="clip"), operands)
                new, y = jax.vmap(step)(state, of_tokens)
                out = out.at[jnp.where(runs, tokens, len(out))].set(y, mode="drop")
                return jnp.where(_beside(runs, state), new, state), out

            return one

        state = states.at[slots].get(mode="clip")
        state = jnp.where(_beside(rows.begins.at[its].get(mode="clip"), state), 0, state)
        kept = advance(num_kept, jnp.zeros_like(num_kept))
        state, out = lax.fori_loop(0, num_kept.max(), kept, (state, out))
        states = states.at[slots].set(state, mode="drop")
        rest = advance(lengths, num_kept)
        _, out = lax.fori_loop(0, (lengths - num_kept).max(), rest, (state, out))
        return states, out

    at_once = min(at_once, len(drafts.rows))
    if at_once == 1:
        return lax.fori_loop(0, drafts.num_rows, run_one, carried)
    return lax.fori_loop(0, -(-drafts.num_rows // at_once), run_some, carried)


def _read(states: jax.Array, slot: jax.Array, is_first: jax.Array) -> jax.Array:
    """The state of a slot, or zeros if the row begins a request.

    It is read once, into memory of its own. Where XLA for CPUs can fuse the read into what uses it,
    some use may come after the update, so it copies the states of all slots.
    """
    return lax.cond(
        is_first,
        lambda: jnp.zeros(states.shape[1:], states.dtype),
        lambda: lax.dynamic_index_in_dim(states, slot, keepdims=False),
    )


def _pad_rows(x: jax.Array, count: int) -> jax.Array:
    return jnp.pad(x, ((0, count), *((0, 0),) * (x.ndim - 1))) if count else x


def _beside(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Flags of rows, in a shape that broadcasts against an array of these rows."""
    return flags.reshape(-1, *[1] * (x.ndim - 1))

"""Takes states through the tiles of a step on TPUs: prompts and their chunks.

The grid walks over the tiles, whose number is the batch's. All heads of a row's state stay in VMEM
from the row's first tile to the last one, so a state is read once and written once for each row.
While a tile is computed, the operands of the next one are loaded.

Tiles begin at any token. Operands are arrays [T * heads, numbers], so a tile is a window of whole
registers, and a load with a stride has a head's rows of all tokens. The window of a tile near the
end of the step begins before the tile, and an op makes zeros of what is around the tile's tokens.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.recurrent.rows import TILE, StateRows
from jaxllm_kernels.recurrent.tpu_blocks import LANES, SUBLANES, vmem_of_tiles

# A reference to a kernel's operand.
Ref = Any

# For what is computed, registers that are spilled among it.
_VMEM_BESIDE = 16 << 20
# What a tile is for its row. It can be several of them.
_BEGINS, _LOADS, _STORES = 1, 2, 4


class Window(NamedTuple):
    """The tokens of a window that belong to its tile."""

    first: jax.Array  # int32 []
    end: jax.Array  # int32 []

    def keep(self, x: jax.Array) -> jax.Array:
        """Make zeros of the other rows of x [TILE, ...], also where these are NaN."""
        tokens = lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where((tokens >= self.first) & (tokens < self.end), x, 0.0)

    def load(self, operand: Ref, head: Any) -> jax.Array:
        """A head's numbers [TILE, numbers] of an operand [TILE * heads, numbers]."""
        return self.keep(operand[rows_of_head(operand, head), :])


def rows_of_head(x: Ref, head: Any) -> Any:
    """Where an operand, or outputs, [TILE * heads, numbers] have those of a head."""
    return pl.ds(head, TILE, stride=len(x) // TILE)


class _Tiles(NamedTuple):
    """What the kernel knows of its tiles, in scalar memory."""

    starts: jax.Array  # int32 [I]: the first token of the window
    firsts: jax.Array  # int32 [I]: that of the tile within it
    counts: jax.Array  # int32 [I]: tokens of the tile
    slots: jax.Array  # int32 [I]
    what: jax.Array  # int32 [I]


def heads_beside(x: jax.Array) -> jax.Array:
    """[T, heads, numbers] in float32, with as many heads as fill registers, and at least so many
    tokens as a window has."""
    num_tokens, num_heads, _ = x.shape
    missing = max(TILE - num_tokens, 0), -num_heads % SUBLANES
    x = x.astype(jnp.float32)
    return jnp.pad(x, ((0, missing[0]), (0, missing[1]), (0, 0))) if any(missing) else x


def numbers_of_heads(first: jax.Array, other: jax.Array) -> jax.Array:
    """Two numbers of each head and token, [T, up to LANES], as an operand. The first row of a token
    has the first numbers of all heads beside each other, every further row the other ones: so a
    token fills registers."""
    first, other = (jnp.pad(x, ((0, 0), (0, LANES - x.shape[1])))[:, None] for x in (first, other))
    shape = len(first), SUBLANES, LANES
    rows = lax.broadcasted_iota(jnp.int32, shape, 1)
    return heads_beside(jnp.where(rows == 0, first, other))


def column_of_head(x: jax.Array, head: Any) -> jax.Array:
    """The numbers of a head, [TILE, 1] of [TILE, heads]."""
    heads = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(heads == head, x, 0.0).sum(axis=1, keepdims=True)


def cumulate(x: jax.Array) -> jax.Array:
    """The sums of each token and all tokens before it, of [TILE, numbers]."""
    return product(ones_below(0), x)


def ones_below(first: int) -> jax.Array:
    """[TILE, TILE] with ones on the diagonal that begins in row `first`, and below it."""
    row, column = places()
    return (row - column >= first).astype(jnp.float32)


def places() -> tuple[jax.Array, jax.Array]:
    """The row and the column of each place of [TILE, TILE]."""
    row, column = (lax.broadcasted_iota(jnp.int32, (TILE, TILE), axis) for axis in range(2))
    return row, column


def product(a: jax.Array, b: jax.Array, *, turned: bool = False) -> jax.Array:
    """a @ b, or a @ b.T, as precise as float32. Matrix units take bfloat16: a product of float32 is
    six of theirs, three if the other operand is bfloat16, and one if both are."""
    axes = ((1,), (1 if turned else 0,)), ((), ())
    if a.dtype == b.dtype == jnp.float32:
        return lax.dot_general(
            a, b, axes, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
        )
    parts = [
        lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)
        for x in _in_bfloat16(a)
        for y in _in_bfloat16(b)
    ]
    return functools.reduce(jnp.add, reversed(parts))


def _in_bfloat16(x: jax.Array) -> list[jax.Array]:
    """What adds up to x, the largest part first."""
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(2):
        # Compilers may leave out a conversion there and back, but not this.
        bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-1 << 16)
        high = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(high.astype(jnp.bfloat16))
        x = x - high
    return [*parts, x.astype(jnp.bfloat16)]


def bytes_of_states(state: jax.Array, rows: StateRows) -> int:
    """The bytes of states that kernels read and write if each row has a tile."""
    return 2 * min(len(rows.slots), len(state)) * state[0].size * state.dtype.itemsize


def run_tiles(
    compute: Callable[..., None],
    operands: Sequence[jax.Array],
    out: jax.Array,
    state: jax.Array,
    rows: StateRows,
    *,
    scratch: Sequence[Any],
    cost: pl.CostEstimate,
    interpret: Any,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """Compute the tiles; return the states and the outputs, both updated in place.

    Args:
      compute: gets the window, references to the operands [TILE * heads, numbers], to the outputs
        [TILE * heads, numbers], to the row's state, and to the scratch.
      operands: as `heads_beside` makes them.
      out: float32 [T, heads, numbers], which has zeros or the outputs of other rows.
    """
    num_tokens, num_heads, size = out.shape
    padded_out = heads_beside(out)
    tiles = _tiles_of(rows, len(padded_out), len(state))
    num_out_heads = padded_out.shape[1]
    flat_out = padded_out.reshape(-1, size)
    flat = [x.reshape(-1, x.shape[2]) for x in operands]
    windows = [
        pl.BlockSpec(
            (pl.Element(TILE * x.shape[1]), pl.Element(x.shape[2])),
            functools.partial(_window, num_heads=x.shape[1]),
        )
        for x in operands
    ]
    whole = pl.BlockSpec(memory_space=pl.ANY)
    after = jax.ShapeDtypeStruct(state.shape, state.dtype)
    if not interpret:
        # Otherwise XLA moves the states of all slots into VMEM and back, where these are small.
        state = pltpu.with_memory_space_constraint(state, pltpu.HBM)
        after = pltpu.HBM(state.shape, state.dtype)
    needed = vmem_of_tiles([x.shape[1:] for x in operands], out.shape[1:], state.shape[1:])
    num_scalars, num_operands = len(tiles), len(operands)
    out, state = pl.pallas_call(
        functools.partial(_run_tile, compute, num_operands=num_operands),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=num_scalars,
            grid=(jnp.maximum(rows.num_tiles, 1),),
            in_specs=[*windows, whole, whole],
            out_specs=[whole, whole],
            scratch_shapes=[
                pltpu.VMEM(state.shape[1:], jnp.float32),
                pltpu.VMEM((TILE * num_out_heads, size), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                *scratch,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(flat_out.shape, jnp.float32), after],
        input_output_aliases={num_scalars + num_operands + i: i for i in range(2)},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=needed + _VMEM_BESIDE
        ),
        cost_estimate=cost,
        interpret=interpret,
        name=name,
    )(*tiles, *flat, flat_out, state)
    return state, out.reshape(padded_out.shape)[:num_tokens, :num_heads]


def _window(i: jax.Array, starts: Ref, *_: Ref, num_heads: int) -> tuple[Any, int]:
    return pl.multiple_of(starts[i] * num_heads, SUBLANES), 0


def _tiles_of(rows: StateRows, num_tokens: int, num_slots: int) -> _Tiles:
    tiles = rows.tiles
    assert tiles is not None
    row, token = tiles.row, tiles.token
    is_tile = jnp.arange(len(row), dtype=jnp.int32) < rows.num_tiles
    slots = rows.slots[row]
    has_slot = is_tile & (slots >= 0) & (slots < num_slots)
    is_first = token == rows.query_starts[row]
    # A row whose drafts are computed elsewhere has no tiles.
    is_last = token + TILE >= rows.query_starts[row] + rows.lengths[row]
    begins = is_first & (rows.begins[row] | ~has_slot)
    what = jnp.where(begins, _BEGINS, jnp.where(is_first, _LOADS, 0))
    what = what + jnp.where(is_last & has_slot, _STORES, 0)
    starts = jnp.clip(token, 0, num_tokens - TILE)
    return _Tiles(
        starts=starts,
        firsts=jnp.where(is_tile, token - starts, 0),
        counts=jnp.where(is_tile, tiles.num_tokens, 0),
        slots=jnp.where(has_slot, slots, 0),
        what=jnp.where(is_tile, what, 0),
    )


def _run_tile(compute: Callable[..., None], *refs: Ref, num_operands: int) -> None:
    tiles = _Tiles(*refs[: len(_Tiles._fields)])
    refs = refs[len(tiles) :]
    operands, refs = refs[:num_operands], refs[num_operands + 2 :]
    out, states, held, computed, done, *scratch = refs
    i = pl.program_id(0)
    slot, what, first, count = (x[i] for x in (tiles.slots, tiles.what, tiles.firsts, tiles.counts))

    @pl.when((what & _BEGINS) != 0)
    def _():
        held[...] = jnp.zeros_like(held)

    @pl.when((what & _LOADS) != 0)
    def _():
        copy = pltpu.make_async_copy(states.at[slot], held, done.at[0])
        copy.start()
        copy.wait()

    @pl.when(count > 0)
    def _():
        compute(Window(first, first + count), operands, computed, held, scratch)
        store = pltpu.make_async_copy(held, states.at[slot], done.at[0])
        pl.when((what & _STORES) != 0)(store.start)
        _send(computed, out, tiles.starts[i], first, count, done.at[1])
        pl.when((what & _STORES) != 0)(store.wait)


def _send(
    computed: Ref, out: Ref, start: jax.Array, first: jax.Array, count: jax.Array, done: Ref
) -> None:
    """Copy the outputs of a tile's tokens: their number is a sum of powers of two."""
    num_heads = len(computed) // TILE

    def rows_from(token: jax.Array, size: int) -> Any:
        return pl.ds(pl.multiple_of(token * num_heads, SUBLANES), size * num_heads)

    def of_all(act: Callable[[Any], None]) -> None:
        size = TILE
        while size:
            token = first + (count & -(2 * size))
            copy = pltpu.make_async_copy(
                computed.at[rows_from(token, size)], out.at[rows_from(start + token, size)], done
            )
            pl.when((count & size) != 0)(functools.partial(act, copy))
            size //= 2

    of_all(lambda copy: copy.start())
    of_all(lambda copy: copy.wait())

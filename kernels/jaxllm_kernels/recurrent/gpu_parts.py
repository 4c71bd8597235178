"""How the kernels for GPUs cut the matrices of states, and what they know of a step's rows.

A thread block has a part of a head's matrix, some of its columns or rows, which a warpgroup holds
in registers. It is nowhere else between its load and its store. Several blocks share a
multiprocessor. While one of them computes, others load and write.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.rows import StateRows

# Adjacent numbers of a matrix that a thread loads at once.
VECTOR = 4
WARPS, LANES = 4, 32
# Lanes below each other, where a part has whole rows. The eight lanes of a row load a whole cache
# line, and add up their sums in three steps.
LANE_ROWS = 4
# Numbers of a part. A thread of a warpgroup holds 64 of them, a quarter of its registers.
_PART = 64 * WARPS * LANES
# What is in place of a row's slot if there is nothing to compute.
SKIP = -1
# Where a part goes from token to token: lanes that share a sum, which takes them three steps.
TURN_LANES = 8
# Numbers of such a part, if its smallest size allows. A thread holds 32 of them, beside as many of
# keys and queries.
_TURN_PART = 32 * WARPS * LANES
# Thread blocks of a multiprocessor. While sums of one are on their way, the others compute.
BLOCKS_OF_CORE = 4


def check_chip(chip: Chip) -> None:
    """Raise ValueError unless the kernels run on a chip."""
    if not chip.is_hopper:
        raise ValueError(f"it runs on Hopper GPUs (compute capability 9.0), not on {chip.name}")
    if why := why_no_mosaic_gpu():
        raise ValueError(f"it {why}")


def columns_of_part(num_rows: int, num_columns: int) -> int:
    """How many columns of a matrix a part has. Raise ValueError if no parts of whole vectors, which
    a warpgroup can hold, make up the matrix."""
    # Two rows of lanes at least: Mosaic has no layout of a single one.
    columns = math.gcd(num_columns, VECTOR * LANES // 2)
    while num_rows * columns > _PART:
        columns //= 2
    # The lanes that are not beside each other have rows of their own, as many as all others. A
    # thread has several rows: Mosaic has no such layout of single ones.
    rows_at_once = WARPS * LANES * VECTOR // columns
    if columns < 2 * VECTOR or num_rows % rows_at_once or num_rows == rows_at_once:
        raise _no_part(num_rows, num_columns)
    return columns


def rows_of_part(num_rows: int, num_columns: int) -> int:
    """How many whole rows of a matrix a part has. Raise ValueError if no parts that a warpgroup can
    hold make up the matrix."""
    beside = VECTOR * LANES // LANE_ROWS
    rows = num_rows
    while rows * num_columns > _PART and rows % 2 == 0:
        rows //= 2
    too_many = rows * num_columns > _PART
    too_few = rows * num_columns <= VECTOR * WARPS * LANES  # a vector for each thread, as above
    if too_many or too_few or rows % (WARPS * LANE_ROWS) or num_columns % beside:
        raise _no_part(num_rows, num_columns)
    return rows


def columns_in_turn(num_rows: int, num_columns: int) -> int:
    """How many columns of a matrix a part has that goes from token to token, where sums are over
    rows. Raise ValueError if no parts that a warpgroup can hold make up the matrix."""
    columns = _own_in_turn(num_rows, num_columns)
    if columns is None:
        raise _no_part(num_rows, num_columns)
    return columns


def rows_in_turn(num_rows: int, num_columns: int) -> int:
    """How many rows such a part has, where sums are over columns."""
    rows = _own_in_turn(num_columns, num_rows)
    if rows is None:
        raise _no_part(num_rows, num_columns)
    return rows


def _no_part(num_rows: int, num_columns: int) -> ValueError:
    return ValueError(f"a warpgroup holds no part of a state of {num_rows} x {num_columns}")


def _own_in_turn(num_summed: int, num_cut: int) -> int | None:
    """How much a part has of the axis that is cut. Of the other one a thread has whole vectors."""
    # A thread has two or more: Mosaic has no such layout of single ones.
    least = 2 * WARPS * LANES // TURN_LANES
    own = math.gcd(num_cut, 2 * least)
    while num_summed * own > _TURN_PART and own > least:
        own //= 2
    fits = own >= least and num_summed * own <= 2 * _TURN_PART
    return own if fits and num_summed % (VECTOR * TURN_LANES) == 0 else None


class RowWork(NamedTuple):
    """The rows that are no decodes: int32 [R], the longest first. Behind the last stand rows that
    are not computed."""

    slot: jax.Array
    begins: jax.Array  # 1 if the row begins its request, else 0
    first: jax.Array  # its first token
    length: jax.Array
    num_kept: jax.Array  # the state that it leaves is that after so many tokens
    num_rows: jax.Array  # [1]: how many rows are computed


def work_of_rows(rows: StateRows, num_slots: int) -> RowWork:
    """List the rows that a kernel computes token by token."""
    is_decode = jnp.arange(len(rows.slots)) < rows.num_decodes
    runs = ~is_decode & (rows.lengths > 0) & (rows.slots >= 0) & (rows.slots < num_slots)
    order = jnp.argsort(jnp.where(runs, -rows.lengths, 1))
    slot, begins, first, length, num_kept = (
        x[order].astype(jnp.int32)
        for x in (rows.slots, rows.begins, rows.query_starts[:-1], rows.lengths, rows.num_kept)
    )
    return RowWork(
        slot=slot,
        begins=begins,
        first=first,
        length=length,
        num_kept=num_kept,
        num_rows=jnp.sum(runs, dtype=jnp.int32)[None],
    )


def places_of_decodes(rows: StateRows, num_rows: int, num_slots: int) -> jax.Array:
    """int32 [R]: twice the slot of a decode, and one more if it begins its request; else SKIP."""
    slots = rows.slots[:num_rows]
    is_decode = jnp.arange(num_rows, dtype=jnp.int32) < rows.num_decodes
    runs = is_decode & (slots >= 0) & (slots < num_slots)
    return jnp.where(runs, 2 * slots + rows.begins[:num_rows], SKIP).astype(jnp.int32)


def load_float32(ref: Any, layout: Any) -> jax.Array:
    """Load an array into registers."""
    # Importing Mosaic takes long, and a plan only asks for the sizes of parts.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    x = plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
    return x.astype(jnp.float32)

"""Copies states on TPUs: between their slots and the rows of a step, and to and from snapshots.

The arrays of all slots stay in HBM. Where XLA copies states, it brings whole arrays into VMEM and
back if these are small.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# A reference to a kernel's operand.
Ref = Any


def read_slots(
    state: jax.Array, slots: jax.Array, *, after: jax.Array, interpret: Any
) -> jax.Array:
    """The states [R, ...] of int32 slots [R]. Of slots that are out of range, it is anything.

    It waits for `after`, of which it reads nothing. Otherwise XLA reads the states of all layers at
    the begin of a step, and has to move them out of VMEM until it needs them.
    """
    return pl.pallas_call(
        functools.partial(_read, num_slots=len(state)),
        grid_spec=_whole(2),
        out_shape=[jax.ShapeDtypeStruct((len(slots), *state.shape[1:]), state.dtype)],
        cost_estimate=_cost(slots, state),
        interpret=interpret,
        name="read_slots",
    )(slots, after, _in_hbm(state, interpret))[0]


def write_slots(
    state: jax.Array, slots: jax.Array, rows: jax.Array, *, interpret: Any
) -> jax.Array:
    """The states [S, ...] with those of rows [R, ...] in their slots, updated in place. Slots must
    differ; those out of range are skipped."""
    after = pltpu.HBM if not interpret else jax.ShapeDtypeStruct
    return pl.pallas_call(
        functools.partial(_write, num_slots=len(state)),
        grid_spec=_whole(2),
        out_shape=[after(state.shape, state.dtype)],
        input_output_aliases={2: 0},
        cost_estimate=_cost(slots, state),
        interpret=interpret,
        name="write_slots",
    )(slots, rows, _in_hbm(state, interpret))[0]


def copy_slots(
    sources: Sequence[jax.Array],
    targets: Sequence[jax.Array],
    pairs: jax.Array,
    count: jax.Array,
    *,
    interpret: Any,
) -> list[jax.Array]:
    """The targets, updated in place: for the first `count` pairs, what place pairs[i, 0] of each
    source [S, ...] has is copied to place pairs[i, 1] of its target. These places must differ."""
    after = pltpu.HBM if not interpret else jax.ShapeDtypeStruct
    num_arrays = len(sources)
    copied = pl.pallas_call(
        functools.partial(_copy_pairs, num_arrays=num_arrays),
        grid_spec=_whole(2 * num_arrays, num_arrays, num_scalars=2),
        out_shape=[after(target.shape, target.dtype) for target in targets],
        input_output_aliases={2 + num_arrays + i: i for i in range(num_arrays)},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0),
        interpret=interpret,
        name="copy_slots",
    )(
        pairs.reshape(-1),
        count[None],
        *(_in_hbm(array, interpret) for array in (*sources, *targets)),
    )
    return list(copied)


def _whole(
    num_arrays: int, num_results: int = 1, num_scalars: int = 1
) -> pltpu.PrefetchScalarGridSpec:
    """Slots in scalar memory, arrays where they are."""
    where = pl.BlockSpec(memory_space=pl.ANY)
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=num_scalars,
        grid=(),
        in_specs=[where] * num_arrays,
        out_specs=[where] * num_results,
        scratch_shapes=[pltpu.SemaphoreType.DMA],
    )


def _in_hbm(state: jax.Array, interpret: Any) -> jax.Array:
    return state if interpret else pltpu.with_memory_space_constraint(state, pltpu.HBM)


def _cost(slots: jax.Array, state: jax.Array) -> pl.CostEstimate:
    row_bytes = state.dtype.itemsize * state.size // len(state)
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * len(slots) * row_bytes)


def _read(slots: Ref, _: Ref, state: Ref, rows: Ref, done: Ref, *, num_slots: int) -> None:
    _copy(slots, num_slots, lambda i, slot: pltpu.make_async_copy(state.at[slot], rows.at[i], done))


def _write(slots: Ref, rows: Ref, _: Ref, after: Ref, done: Ref, *, num_slots: int) -> None:
    _copy(slots, num_slots, lambda i, slot: pltpu.make_async_copy(rows.at[i], after.at[slot], done))


def _copy(slots: Ref, num_slots: int, copy: Any) -> None:
    """Start the copies of all rows that have a slot, then wait for as many."""

    def of_all(act: Any) -> None:
        def of_row(i: jax.Array, _: None) -> None:
            slot = slots[i]

            @pl.when((slot >= 0) & (slot < num_slots))
            def _():
                act(copy(i, slot))

        lax.fori_loop(jnp.int32(0), jnp.int32(len(slots)), of_row, None)

    of_all(lambda it: it.start())
    of_all(lambda it: it.wait())


def _copy_pairs(pairs: Ref, count: Ref, *refs: Ref, num_arrays: int) -> None:
    sources, targets = refs[:num_arrays], refs[2 * num_arrays : 3 * num_arrays]

    def of_pair(i: jax.Array, _: None) -> None:
        its = [
            pltpu.make_async_copy(source.at[pairs[2 * i]], target.at[pairs[2 * i + 1]], refs[-1])
            for source, target in zip(sources, targets, strict=True)
        ]
        for copy in its:
            copy.start()
        for copy in its:
            copy.wait()

    lax.fori_loop(jnp.int32(0), count[0], of_pair, None)

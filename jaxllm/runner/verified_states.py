"""Lets the states of recurrent layers go on over the drafts that are right, at the end of a step.

A row with drafts has left its states before them, and each layer has kept what its ops got of the
drafts. So the ops run once more, for the drafts that are right only. That reads and writes each
state of such a row one more time, whatever the number of its drafts. States behind every draft, of
which the step would keep one, would be written for each draft, and read and written by the choice;
and all of them would be in memory together, in every layer.

Of late rows the second program learns which drafts are right. So a step leaves what its layers have
kept, and the states of these rows go on there.
"""

from typing import Any

import jax
from jax.sharding import Mesh
from jaxllm_kernels.recurrent.rows import rows_of_drafts

from jaxllm.layers.context import Cache, StepContext
from jaxllm.layers.state import Drafts, StateOps, States, UnverifiedStates

# What the ops of each layer with states got of the drafts of a step.
Kept = tuple[tuple[Drafts, ...], ...]


def kept_of_drafts(caches: tuple[Cache, ...]) -> Kept:
    """What layers have kept; () if no row of the step can have drafts."""
    return tuple(its.drafts for its in caches if isinstance(its, UnverifiedStates))


def verified_states(
    caches: tuple[Cache, ...], context: StepContext, num_accepted: jax.Array
) -> tuple[Any, ...]:
    """The caches after a step, whose rows have so many drafts that are right, i32 [R]."""
    rows, ops = context.state_rows, context.state_ops
    if rows is None or rows.drafts is None:
        return caches
    assert ops is not None
    states = [its.states for its in caches if isinstance(its, UnverifiedStates)]
    kept, drafting = kept_of_drafts(caches), rows.drafts.rows
    after = iter(go_on(states, kept, ops, context.mesh, rows.slots, drafting, num_accepted))
    return tuple(next(after) if isinstance(its, UnverifiedStates) else its for its in caches)


def go_on(
    states: list[States] | tuple[States, ...],
    kept: Kept,
    ops: StateOps,
    mesh: Mesh | None,
    slots: jax.Array,
    drafting: jax.Array,
    num_accepted: jax.Array,
) -> list[States]:
    """The states after the drafts that are right. `drafting` i32 [M] are the rows with drafts, then
    R; `slots` and `num_accepted` i32 [R] are of all rows."""
    num_slots = len(states[0][0])
    (of_conv, *_), *_ = kept
    num_drafts = len(of_conv[0]) // len(drafting)
    rows = rows_of_drafts(
        slots.at[drafting].get(mode="fill", fill_value=num_slots),
        num_accepted.at[drafting].get(mode="fill", fill_value=0),
        num_drafts,
    )
    with jax.named_scope("verified_states"):
        return [
            UnverifiedStates(its, drafts).advance(ops, rows, mesh)
            for its, drafts in zip(states, kept, strict=True)
        ]

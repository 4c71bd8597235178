"""Lets the states of recurrent layers go on over the drafts that are right, at the end of a step.

A row with drafts has left its states before them, and each layer has kept what its ops got of the
drafts. So the ops run once more, for the drafts that are right only. That reads and writes each
state of such a row one more time, whatever the number of its drafts. States behind every draft, of
which the step would keep one, would be written for each draft, and read and written by the choice;
and all of them would be in memory together, in every layer.
"""

from typing import Any

import jax
from jaxllm_kernels.recurrent.rows import rows_of_drafts

from jaxllm.layers.context import Cache, StepContext
from jaxllm.layers.state import UnverifiedStates


def verified_states(
    caches: tuple[Cache, ...], context: StepContext, num_accepted: jax.Array
) -> tuple[Any, ...]:
    """The caches after a step, whose rows have so many drafts that are right, i32 [R]."""
    rows, ops = context.state_rows, context.state_ops
    if rows is None or rows.drafts is None:
        return caches
    assert ops is not None
    drafts = rows.drafts
    num_slots = next(len(its.states[0]) for its in caches if isinstance(its, UnverifiedStates))
    num_drafts = len(drafts.tokens) // len(drafts.rows)
    of_drafts = rows_of_drafts(
        rows.slots.at[drafts.rows].get(mode="fill", fill_value=num_slots),
        num_accepted.at[drafts.rows].get(mode="fill", fill_value=0),
        num_drafts,
    )
    with jax.named_scope("verified_states"):
        return tuple(
            its.advance(ops, of_drafts, context.mesh) if isinstance(its, UnverifiedStates) else its
            for its in caches
        )

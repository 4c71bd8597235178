"""Copies between the states of slots and snapshots of states, inside a step.

Snapshots are arrays [snapshots, ...] beside the states' [slots, ...]. The copies are a loop, which
changes its arrays in place and costs nothing in a step without copies.
"""

import dataclasses
from typing import Any

import jax

from jaxllm.plan.stages import StagePlan
from jaxllm.runner.inputs import StepInputs
from jaxllm.runner.state import DeviceState


def load_states(stage: StagePlan, inputs: StepInputs, state: DeviceState) -> DeviceState:
    """Copy snapshots to the slots of rows that go on from them: the beginning of a step."""
    if inputs.state_copies is None:
        return state
    pages, states = _parts(stage, state)
    its = inputs.state_copies
    states = _copy(state.snapshots, states, its.loads, its.num_loads)
    return dataclasses.replace(state, caches=(*pages, *states))


def store_states(stage: StagePlan, inputs: StepInputs, state: DeviceState) -> DeviceState:
    """Copy the states that rows have left to snapshots: the end of a step."""
    if inputs.state_copies is None:
        return state
    _, states = _parts(stage, state)
    its = inputs.state_copies
    return dataclasses.replace(
        state, snapshots=_copy(states, state.snapshots, its.stores, its.num_stores)
    )


def _parts(stage: StagePlan, state: DeviceState) -> tuple[Any, Any]:
    """The caches of a state: pages, and states."""
    num_pages = len(stage.cache_shapes)
    return state.caches[:num_pages], state.caches[num_pages:]


def _copy(sources: Any, targets: Any, pairs: jax.Array, count: jax.Array) -> Any:
    """Copy the place pairs[i, 0] of each source to the place pairs[i, 1] of its target."""

    def copy_one(index: jax.Array, targets: Any) -> Any:
        source, target = pairs[index]
        return jax.tree.map(
            lambda its, array: jax.lax.dynamic_update_slice_in_dim(
                array, jax.lax.dynamic_slice_in_dim(its, source, 1), target, 0
            ),
            sources,
            targets,
        )

    return jax.lax.fori_loop(0, count, copy_one, targets)

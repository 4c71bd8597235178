"""Copies between the states of slots and snapshots of states, inside a step.

Snapshots are arrays [snapshots, ...] beside the states' [slots, ...]. The copies change their
arrays in place, and cost nothing in a step without copies.
"""

import dataclasses
from typing import Any

import jax

from jaxllm.layers.state import StateOps
from jaxllm.plan.stages import StagePlan
from jaxllm.runner.inputs import StepInputs
from jaxllm.runner.state import DeviceState


def load_states(
    stage: StagePlan, ops: StateOps | None, inputs: StepInputs, state: DeviceState
) -> DeviceState:
    """Copy snapshots to the slots of rows that go on from them: the beginning of a step."""
    if inputs.state_copies is None:
        return state
    pages, states = _parts(stage, state)
    its = inputs.state_copies
    states = _copy(stage, ops, state.snapshots, states, its.loads, its.num_loads)
    return dataclasses.replace(state, caches=(*pages, *states))


def store_states(
    stage: StagePlan, ops: StateOps | None, inputs: StepInputs, state: DeviceState
) -> DeviceState:
    """Copy the states that rows have left to snapshots: the end of a step."""
    if inputs.state_copies is None:
        return state
    _, states = _parts(stage, state)
    its = inputs.state_copies
    copied = _copy(stage, ops, states, state.snapshots, its.stores, its.num_stores)
    return dataclasses.replace(state, snapshots=copied)


def _parts(stage: StagePlan, state: DeviceState) -> tuple[Any, Any]:
    """The caches of a state: pages, and states."""
    num_pages = len(stage.cache_shapes)
    return state.caches[:num_pages], state.caches[num_pages:]


def _copy(
    stage: StagePlan,
    ops: StateOps | None,
    sources: Any,
    targets: Any,
    pairs: jax.Array,
    count: jax.Array,
) -> Any:
    """Copy the place pairs[i, 0] of each source to the place pairs[i, 1] of its target."""
    assert ops is not None, "the plan has no ops with states"
    leaves, treedef = jax.tree.flatten(targets)
    if not leaves:
        return targets
    compute = ops.copies
    if stage.mesh.size > 1:
        # Each device copies its part of every state.
        specs = [shape.sharding.spec for shape in jax.tree.leaves(stage.state_shapes)]
        none = jax.sharding.PartitionSpec()
        compute = jax.shard_map(
            compute,
            mesh=stage.mesh,
            in_specs=(specs, specs, none, none),
            out_specs=specs,
            check_vma=False,
        )
    return jax.tree.unflatten(treedef, compute(jax.tree.leaves(sources), leaves, pairs, count))

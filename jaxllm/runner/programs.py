"""The programs that a plan needs: what to compile, with which shapes, for which device.

The runner compiles and runs them; a planner, which has neither weights nor the device, compiles the
same ones for a device that exists only as a description.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np

from jaxllm.parallel.sharding import place, sharding
from jaxllm.runner.buckets import Bucket
from jaxllm.runner.compile import Program
from jaxllm.runner.inputs import InputLayout
from jaxllm.runner.packer import StepPacker
from jaxllm.runner.plan import EnginePlan
from jaxllm.runner.state import DeviceState
from jaxllm.runner.step import ModelSpec, make_step, update_block_tables
from jaxllm.sampling.slot_state import SlotRow, write_slot
from jaxllm.weights.loader import abstract_weights

# Keys of the small programs beside the steps, whose keys are their buckets.
MAKE_STATE = "make_state"
WRITE_TABLES = "write_block_tables"
WRITE_SLOT = "write_slot"

TABLE_WRITES = 1024  # block updates per call of WRITE_TABLES


def make_packer(plan: EnginePlan) -> StepPacker:
    """What turns Schedules into the inputs of the steps."""
    return StepPacker(plan.buckets, num_slots=plan.max_num_seqs, processors=plan.logits_processors)


def declare_programs(
    plan: EnginePlan, layouts: Mapping[Bucket, InputLayout]
) -> dict[Hashable, Program]:
    """All programs of an engine; a step's key is its bucket."""
    model = plan.model_class.abstract(plan.architecture, plan.dtype, plan.mesh.size)
    spec = ModelSpec.of(model)
    weights, state = abstract_weights(model, plan.mesh), DeviceState.abstract(plan)
    everywhere = sharding(plan.mesh)
    kept = jax.tree.map(lambda leaf: leaf.sharding, state)
    row = SlotRow.abstract(plan.num_logits)

    def program(name: str, function: Callable[..., Any], *arguments: Any, **how: Any) -> Program:
        return Program(
            name=name,
            function=function,
            arguments=arguments,
            platform=plan.chip.platform,
            compiler_options=plan.chip.compiler_options,
            **how,
        )

    def make_state() -> DeviceState:
        return DeviceState.zeros(plan)

    # The largest first: it takes longest to compile.
    programs: dict[Hashable, Program] = {
        bucket: program(
            f"step_{bucket}".replace(" ", "_"),
            make_step(plan, spec, layout),
            weights,
            state,
            place(layout.abstract(), everywhere),
            donate=(1,),
            out_shardings=(kept, everywhere),
        )
        for bucket, layout in reversed(list(layouts.items()))
    }
    programs[MAKE_STATE] = program(MAKE_STATE, make_state, donate=(), out_shardings=kept)
    updates = jax.ShapeDtypeStruct((TABLE_WRITES, 3), np.int32)
    programs[WRITE_TABLES] = program(
        WRITE_TABLES,
        _write_tables,
        state,
        place(updates, everywhere),
        donate=(0,),
        out_shardings=kept,
    )
    programs[WRITE_SLOT] = program(
        WRITE_SLOT,
        _write_slot,
        state,
        place(jax.ShapeDtypeStruct((), np.int32), everywhere),
        place(row, everywhere),
        donate=(0,),
        out_shardings=kept,
    )
    return programs


def _write_tables(state: DeviceState, updates: jax.Array) -> DeviceState:
    tables = update_block_tables(state.block_tables, updates)
    return dataclasses.replace(state, block_tables=tables)


def _write_slot(state: DeviceState, slot: jax.Array, row: SlotRow) -> DeviceState:
    return dataclasses.replace(state, slots=write_slot(state.slots, slot, row))

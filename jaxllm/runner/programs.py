"""The programs that a plan needs: what to compile, with which shapes, for which device.

The runner compiles and runs them; a planner, which has neither weights nor the device, compiles the
same ones for a device that exists only as a description.
"""

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxllm.runner.buckets import Bucket
from jaxllm.runner.compile import Program
from jaxllm.runner.inputs import InputLayout
from jaxllm.runner.packer import StepPacker
from jaxllm.runner.plan import EnginePlan
from jaxllm.runner.state import DeviceState
from jaxllm.runner.step import ModelSpec, make_step, update_block_tables
from jaxllm.sampling.slot_state import SlotRow, write_slot

# Keys of the two small programs beside the steps, whose keys are their buckets.
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
    spec, weights = ModelSpec.of(plan.model_class.abstract(plan.architecture, plan.dtype))
    state = DeviceState.abstract(plan)
    # The largest first: it takes longest to compile.
    programs: dict[Hashable, Program] = {
        bucket: Program(
            name=f"step_{bucket}".replace(" ", "_"),
            function=make_step(plan, spec, layout),
            arguments=(weights, state, layout.abstract()),
            donate=(1,),
        )
        for bucket, layout in reversed(layouts.items())
    }
    programs[WRITE_TABLES] = Program(
        name=WRITE_TABLES,
        function=_write_tables,
        arguments=(state, jax.ShapeDtypeStruct((TABLE_WRITES, 3), np.int32)),
        donate=(0,),
    )
    programs[WRITE_SLOT] = Program(
        name=WRITE_SLOT,
        function=_write_slot,
        arguments=(
            state,
            jax.ShapeDtypeStruct((), np.int32),
            SlotRow.abstract(plan.architecture.vocab_size),
        ),
        donate=(0,),
    )
    on_device = SingleDeviceSharding(plan.device)
    return {
        key: dataclasses.replace(
            program,
            arguments=_placed(program.arguments, on_device),
            platform=plan.chip.platform,
            compiler_options=plan.chip.compiler_options,
        )
        for key, program in programs.items()
    }


def _placed(shapes: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes
    )


def _write_tables(state: DeviceState, updates: jax.Array) -> DeviceState:
    tables = update_block_tables(state.block_tables, updates)
    return dataclasses.replace(state, block_tables=tables)


def _write_slot(state: DeviceState, slot: jax.Array, row: SlotRow) -> DeviceState:
    return dataclasses.replace(state, slots=write_slot(state.slots, slot, row))

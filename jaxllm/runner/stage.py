"""A part of the model on its devices; without pipeline parallelism, the whole model.

The devices run a stage's programs in the order of its calls, and no call waits for them. Only this
class holds the device state: each program consumes the state and leaves a new one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.offload.buffers import Buffer, group_buffers, is_of_snapshots, num_groups
from jaxllm.parallel.sharding import sharding
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.stages import StagePlan
from jaxllm.programs.compile import Programs
from jaxllm.programs.declare import (
    MAKE_ADAPTERS,
    MAKE_STATE,
    TABLE_WRITES,
    WRITE_ADAPTER,
    WRITE_EMBEDS,
    WRITE_SLOT,
    WRITE_TABLES,
    BlocksKey,
    EncodeKey,
    program_key,
)
from jaxllm.programs.drafting import ADMIT_DRAFTS, DRAFT_AHEAD, ReadKey
from jaxllm.runner.late import LateKey, Left, Tables, Unsampled
from jaxllm.runner.outputs import StageOutputs, StepOutputs
from jaxllm.runner.packer import PackedStep
from jaxllm.runner.state import DeviceState
from jaxllm.sampling.slot_state import SlotRow


class Stage:
    """Owns the weights and the state of a part of the model."""

    def __init__(
        self, plan: EnginePlan, stage: StagePlan, programs: Programs, weights: list[jax.Array]
    ):
        self._plan = plan
        self._stage = stage
        self._num_table_rows = len(plan.cache_groups) * plan.max_num_seqs
        self._programs = programs
        self._buffers = [group_buffers(plan, stage, group) for group in range(num_groups(plan))]
        self.weights = weights  # empty while the engine sleeps
        # Awaited: memory that is not there is an error of the start, and of no request.
        self._state: DeviceState | None = jax.block_until_ready(
            programs[program_key(stage, MAKE_STATE)]()
        )
        self._adapters: Any = None  # made when the first one is written
        self.everywhere = sharding(stage.mesh)

    @property
    def tokens(self) -> jax.Array:
        """The last sampled token of each slot. The next step consumes this table."""
        assert self._state is not None and self._state.tokens is not None
        return self._state.tokens

    def run(self, packed: PackedStep, *arrived: jax.Array) -> StepOutputs | StageOutputs:
        """Dispatch a step; in a pipeline, with the array that arrived from another stage. Return
        the step's output, for the next stage or for the host."""
        program = self._programs[program_key(self._stage, packed.bucket)]
        arguments: tuple[Any, ...] = arrived
        if packed.bucket.has_adapters:
            assert self._adapters is not None, "rows have adapters, and none was written"
            arguments = (*(arrived or (None,)), self._adapters)
        state = self._take_state()
        self._state, left = program(self.weights, state, packed.buffer, *arguments)
        return left

    def write_adapter(self, slot: int, one: Any) -> None:
        """Put an adapter into a slot. Steps that were dispatched before still have the old one."""
        adapters, self._adapters = self._adapters, None
        if adapters is None:
            adapters = self._programs[program_key(self._stage, MAKE_ADAPTERS)]()
        program = self._programs[program_key(self._stage, WRITE_ADAPTER)]
        self._adapters = program(adapters, np.int32(slot), one)

    def sample_late(
        self, key: LateKey, left: Left, unsampled: Unsampled, packed: np.ndarray
    ) -> Left:
        """Sample the late rows of the newest step, which has left these outputs. Return its
        outputs, complete."""
        program = self._programs[program_key(self._stage, key)]
        state = self._take_state()
        tables, left = program(Tables.of(self._plan, state, key), left, unsampled, packed)
        self._state = tables.put_into(state)
        return left

    def write_slot(self, slot: int, row: SlotRow) -> None:
        """Set what the sampler keeps about the request in a slot."""
        program = self._programs[program_key(self._stage, WRITE_SLOT)]
        self._state = program(self._take_state(), np.int32(slot), row)

    def admit_drafts(self, slot: int, tokens: np.ndarray) -> None:
        """Give the drafter the tokens of the request in a slot, i32 [max_model_len]."""
        program = self._programs[program_key(self._stage, ADMIT_DRAFTS)]
        self._state = program(self._take_state(), np.int32(slot), tokens)

    def encode(self, num_patches: int, numbers: np.ndarray, pixels: np.ndarray) -> None:
        """Put images into the pool, by the program of so many patches."""
        program = self._programs[program_key(self._stage, EncodeKey(num_patches))]
        self._state = program(self.weights, self._take_state(), numbers, pixels)

    def write_embeds(self, row: int, embeddings: np.ndarray) -> None:
        """Put embeddings of prompts into the pool, from a row on."""
        program = self._programs[program_key(self._stage, WRITE_EMBEDS)]
        self._state = program(self._take_state(), np.int32(row), embeddings)

    def read_draft(self, num_tokens: int, packed: np.ndarray) -> None:
        """Let the draft model read, in the program of so many tokens."""
        program = self._programs[program_key(self._stage, ReadKey(num_tokens))]
        self._state = program(self.weights, self._take_state(), packed)

    def draft_ahead(self, packed: np.ndarray) -> jax.Array:
        """Make drafts for late rows of the step that comes next. Return them, i32 [M, k]."""
        program = self._programs[program_key(self._stage, DRAFT_AHEAD)]
        self._state, drafts = program(self.weights, self._take_state(), packed)
        return drafts

    def write_block_tables(self, updates: np.ndarray) -> None:
        """Apply the block-table changes that a step has no room for, i32 [n, 3]."""
        for first in range(0, len(updates), TABLE_WRITES):
            chunk = updates[first : first + TABLE_WRITES]
            # Padding is past the last row of the tables.
            padded = np.full((TABLE_WRITES, 3), self._num_table_rows, np.int32)
            padded[: len(chunk)] = chunk
            program = self._programs[program_key(self._stage, WRITE_TABLES)]
            self._state = program(self._take_state(), padded)

    def block_buffers(self, group: int) -> tuple[Buffer, ...]:
        """The buffers for blocks of a cache group; empty: the stage has no caches of it."""
        return self._buffers[group]

    def read_blocks(self, group: int, blocks: np.ndarray) -> tuple[jax.Array, ...]:
        """Copy blocks of a cache group, i32 [blocks of a call], to new buffers. Behind the cache
        groups, snapshots are a group."""
        assert (state := self._state) is not None, "there is no cache to read"
        program = self._programs[program_key(self._stage, BlocksKey("read", group))]
        arrays = self._arrays(state, group)
        buffers = program(_caches(arrays, self._buffers[group]), blocks)
        for buffer in buffers:
            buffer.copy_to_host_async()
        return buffers

    def write_blocks(self, group: int, blocks: np.ndarray, data: Sequence[jax.Array]) -> None:
        """Copy buffers to blocks of a cache group, i32 [blocks of a call]."""
        program = self._programs[program_key(self._stage, BlocksKey("write", group))]
        buffers, state = self._buffers[group], self._take_state()
        caches = self._arrays(state, group)
        indices = [index for buffer in buffers for index in buffer.caches]
        written = program(_caches(caches, buffers), blocks, tuple(data))
        for index, cache in zip(indices, written, strict=True):
            caches[index] = cache
        if is_of_snapshots(self._plan, group):
            snapshots = jax.tree.unflatten(jax.tree.structure(state.snapshots), caches)
            self._state = dataclasses.replace(state, snapshots=snapshots)
        else:
            self._state = dataclasses.replace(state, caches=tuple(caches))

    def reset(self) -> None:
        """Start over with an empty cache, after a step has failed and its state is lost."""
        self._state = None  # the next step makes it: there may be no room for two caches
        self._adapters = None  # they are written again before a step needs them

    def ensure_state(self) -> None:
        """Make the state now if it is missing. Otherwise the next step would make it."""
        self._state = self._take_state()

    def free(self) -> None:
        """Free the devices' memory. Nothing can run any more."""
        self.weights, self._state, self._adapters = [], None, None

    def _arrays(self, state: DeviceState, group: int) -> list[Any]:
        """The arrays of which a group's caches are some."""
        if is_of_snapshots(self._plan, group):
            return jax.tree.leaves(state.snapshots)
        return list(state.caches)

    def _take_state(self) -> DeviceState:
        """Return the state, for a program that consumes it."""
        state = self._state
        if state is None:
            state = self._programs[program_key(self._stage, MAKE_STATE)]()
        self._state = None
        return state


def _caches(arrays: Sequence[Any], buffers: Sequence[Buffer]) -> tuple[Any, ...]:
    return tuple(arrays[index] for buffer in buffers for index in buffer.caches)

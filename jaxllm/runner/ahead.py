"""The program in which a draft model or a head drafts for rows that sample late.

    draft_ahead(weights, state, packed) -> (state, drafts)

Other rows have their drafts made at the begin of the step that verifies them. The masks of late
rows are made on the host while that step runs, one behind each draft, so the host must have the
drafts by then. This program makes them, right before the step and in the blocks that the step gives
the rows, and leaves them in the state, where the step finds them. A step whose late rows have no
drafts has no such program before it.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.runner.drafting import AheadRows, Drafting
from jaxllm.runner.inputs import SlotTable, write_block_updates
from jaxllm.runner.state import DeviceState
from jaxllm.runner.step import update_block_tables
from jaxllm.scheduler.schedule import CARRIED_TOKEN, GO_ON, Schedule
from jaxllm.speculation.drafter import NO_DRAFT


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class AheadInputs:
    """The late rows with drafts of a step; fields as in StepInputs."""

    slots: jax.Array  # i32 [M]
    starts: jax.Array  # i32 [M]
    num_drafts: jax.Array  # i32 [M]
    newest: jax.Array  # i32 [M]: the token before the drafts, or CARRIED_TOKEN
    prompt_lens: jax.Array  # i32 [M]
    row_params: jax.Array  # i32 [M, columns]
    block_updates: jax.Array  # i32 [U, 3]


class PackedAhead(NamedTuple):
    """What a Schedule becomes before the drafts of its late rows are made."""

    buffer: np.ndarray  # i32, by the AheadLayout
    more_block_updates: np.ndarray  # as in PackedStep


class AheadLayout:
    """Where each field of AheadInputs lies in the one buffer that the host uploads."""

    def __init__(
        self,
        num_rows: int,
        *,
        num_slots: int,
        num_cache_groups: int,
        num_param_columns: int,
    ):
        self._num_slots, self._num_cache_groups = num_slots, num_cache_groups
        # The few tokens of a row reach into two more blocks at most, unless blocks are tiny.
        self._num_updates = 2 * num_rows * num_cache_groups
        shapes = {
            "slots": (num_rows,),
            "starts": (num_rows,),
            "num_drafts": (num_rows,),
            "newest": (num_rows,),
            "slot_columns": (1 + num_param_columns, num_rows),  # of `SlotTable`
            "block_updates": (self._num_updates, 3),
        }
        self._fields: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self.size = 0
        for name, shape in shapes.items():
            end = self.size + math.prod(shape)
            self._fields[name] = (slice(self.size, end), shape)
            self.size = end

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape of the packed buffer, for compiling."""
        return jax.ShapeDtypeStruct((self.size,), np.int32)

    def pack(self, schedule: Schedule, table: SlotTable) -> PackedAhead | None:
        """Build the buffer for the late rows of a step; None: they have no drafts."""
        late, drafts = schedule.late_rows, schedule.num_drafts
        if late is None or drafts is None or not len(late := late[drafts[late] > 0]):
            return None
        buffer = np.zeros(self.size, np.int32)
        view = {name: buffer[span].reshape(shape) for name, (span, shape) in self._fields.items()}
        rows, slots = len(late), schedule.slots[late]
        first = np.cumsum(schedule.num_tokens) - schedule.num_tokens
        view["slots"][:rows] = slots
        view["slots"][rows:] = self._num_slots
        view["starts"][:rows] = schedule.starts[late]
        view["num_drafts"][:rows] = drafts[late]
        view["newest"][:rows] = schedule.token_ids[first[late]]
        view["slot_columns"][:, :rows] = table.columns[slots].T
        updates = schedule.block_updates
        updates = updates[np.isin(updates[:, 1], slots)]
        more = updates[self._num_updates :]
        where = {"num_slots": self._num_slots, "num_groups": self._num_cache_groups}
        write_block_updates(updates[: self._num_updates], view["block_updates"], **where)
        return PackedAhead(
            buffer, write_block_updates(more, np.empty((len(more), 3), np.int32), **where)
        )

    def unpack(self, buffer: jax.Array) -> AheadInputs:
        """Cut the buffer into fields; traced."""
        field = {name: buffer[span].reshape(shape) for name, (span, shape) in self._fields.items()}
        columns = field.pop("slot_columns")
        return AheadInputs(**field, prompt_lens=columns[0], row_params=columns[1:].T)


def make_draft_ahead(
    make_drafting: Callable[[list[jax.Array]], Drafting], layout: AheadLayout
) -> Callable[..., tuple[DeviceState, jax.Array]]:
    """Make the program. `make_drafting` makes what drafts of the weights that a step takes. The
    caller donates the state."""

    def draft_ahead(
        weights: list[jax.Array], state: DeviceState, packed: jax.Array
    ) -> tuple[DeviceState, jax.Array]:
        inputs = layout.unpack(packed)
        block_tables = update_block_tables(state.block_tables, inputs.block_updates)
        state = dataclasses.replace(state, block_tables=block_tables)
        assert state.tokens is not None
        lengths = state.lengths.at[inputs.slots].get(mode="fill", fill_value=0)
        carried = state.tokens.at[inputs.slots].get(mode="fill", fill_value=0)
        rows = AheadRows(
            slots=inputs.slots,
            num_drafts=inputs.num_drafts,
            lengths=jnp.where(inputs.starts == GO_ON, lengths, inputs.starts) + 1,
            newest=jnp.where(inputs.newest == CARRIED_TOKEN, carried, inputs.newest),
            prompt_lens=inputs.prompt_lens,
            row_params=inputs.row_params,
        )
        state = make_drafting(weights).ahead(rows, state)
        assert state.drafts is not None
        drafts = state.drafts.at[inputs.slots].get(mode="fill", fill_value=NO_DRAFT)
        return state, drafts

    return draft_ahead

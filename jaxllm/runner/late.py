"""The second program of a step that has late rows: it samples them, each under its mask.

    sample_late(tokens, slots, lengths, left, logits, packed) -> (tokens, slots, left)

The step's own program runs as far as the logits, which it leaves on the device, and samples its
other rows. The masks of the late rows need tokens of the step before, which the host reads
meanwhile. There is one such program per number of rows, whatever the kind of step: it sees logits
and no tokens of prompts. A step without late rows is one program, as if there were no other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.runner.inputs import SlotTable
from jaxllm.runner.step import sample_rows
from jaxllm.sampling.logprobs import LogprobOutput
from jaxllm.sampling.slot_state import SlotState
from jaxllm.scheduler.schedule import Schedule


class Left(NamedTuple):
    """What a step leaves for the host about the tokens of its rows; fields as in StepOutputs."""

    tokens: jax.Array
    logprobs: LogprobOutput


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LateInputs:
    """The late rows of a step, in the places that they have there. In all other rows, and in
    padding, `samples` is not set."""

    slots: jax.Array  # i32 [R]
    samples: jax.Array  # bool [R]
    prompt_lens: jax.Array  # i32 [R]
    row_params: jax.Array  # i32 [R, columns]
    masks: jax.Array  # u32 [R, words]: a bit for each token, lowest first


class LateLayout:
    """Where each field of LateInputs lies in the one buffer that the host uploads."""

    def __init__(self, num_rows: int, *, num_slots: int, num_param_columns: int, num_words: int):
        self.num_rows = num_rows
        self._num_slots = num_slots
        shapes = {
            "slots": (num_rows,),
            "samples": (num_rows,),
            "slot_columns": (1 + num_param_columns, num_rows),  # of `SlotTable`
            "masks": (num_rows, num_words),
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

    def pack(self, schedule: Schedule, table: SlotTable, masks: np.ndarray) -> np.ndarray:
        """Build the buffer of a step with late rows, whose masks are i32 [late rows, words]."""
        assert schedule.late_rows is not None, f"step {schedule.step} has no late rows"
        buffer = np.zeros(self.size, np.int32)
        view = {name: buffer[span].reshape(shape) for name, (span, shape) in self._fields.items()}
        rows, late = schedule.num_rows, schedule.late_rows
        view["slots"][:rows] = schedule.slots
        view["slots"][rows:] = self._num_slots
        view["samples"][late] = 1
        view["slot_columns"][:, :rows] = table.columns[schedule.slots].T
        # The logits may be padded; the masks of padding stay zero.
        view["masks"][late, : masks.shape[1]] = masks
        return buffer

    def unpack(self, buffer: jax.Array) -> LateInputs:
        """Cut the buffer into fields; traced."""
        field = {name: buffer[span].reshape(shape) for name, (span, shape) in self._fields.items()}
        columns = field["slot_columns"]
        return LateInputs(
            slots=field["slots"],
            samples=field["samples"] != 0,
            prompt_lens=columns[0],
            row_params=columns[1:].T,
            masks=jax.lax.bitcast_convert_type(field["masks"], jnp.uint32),
        )


def make_sample_late(plan: EnginePlan, layout: LateLayout) -> Callable[..., object]:
    """Make the program for steps of so many rows. The caller donates the tables."""

    def sample_late(
        tokens: jax.Array,
        slots: SlotState,
        lengths: jax.Array,
        left: Left,
        logits: jax.Array,
        packed: jax.Array,
    ) -> tuple[jax.Array, SlotState, Left]:
        """Sample into the tables `tokens` and `slots` of the state, which are those after the
        step. So are `lengths`, from which a row has the place of its token."""
        inputs = layout.unpack(packed)
        context_lens = lengths.at[inputs.slots].get(mode="fill", fill_value=0)
        with jax.named_scope("sample_late"):
            its = sample_rows(
                plan,
                inputs,
                logits,
                context_lens=context_lens,
                tokens=tokens,
                slots=slots,
                masks=inputs.masks,
            )

        def merged(new: jax.Array, old: jax.Array) -> jax.Array:
            late = inputs.samples.reshape(-1, *[1] * (new.ndim - 1))
            return jnp.where(late, new, old)

        merged_left = jax.tree.map(merged, Left(its.of_rows, its.logprobs), left)
        return its.tokens, its.slots, merged_left

    return sample_late

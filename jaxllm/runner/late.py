"""The second program of a step that has late rows: it samples them, each under its mask.

    sample_late(tables, left, unsampled, packed) -> (tables, left)

The step's own program runs as far as the logits, which it leaves on the device, and samples its
other rows. The masks of the late rows need tokens of the step before, which the host reads
meanwhile. There is one such program per number of rows, whatever the kind of step: it sees logits
and no tokens of prompts. A step without late rows is one program, as if there were no other.

In an engine that speculates, steps in which rows may have drafts have a program of their own, since
they leave logits behind each draft. It verifies the drafts of late rows. If the drafter proposes,
all these programs propose the next ones; a draft model or a head goes ahead in a program before the
step (`runner.ahead`). The host knows which drafts the grammar takes, and no others count.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.sampler.api import LogprobOutput

from jaxllm.layers.state import States
from jaxllm.plan.buckets import Bucket
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.runner import draft_head, draft_model
from jaxllm.runner.drafting import Ends, Proposing
from jaxllm.runner.inputs import SlotTable
from jaxllm.runner.outputs import DraftedOutputs
from jaxllm.runner.sample_rows import sample_rows
from jaxllm.runner.state import DeviceState
from jaxllm.runner.verified_states import Kept, go_on
from jaxllm.runner.verify import Verified, find_places, verify
from jaxllm.scheduler.schedule import LateMasks, Schedule
from jaxllm.speculation.drafter import NO_DRAFT
from jaxllm.speculation.drafters import make_drafter


class Left(NamedTuple):
    """What a step leaves for the host about the tokens of its rows; fields as in StepOutputs."""

    tokens: jax.Array
    logprobs: LogprobOutput
    drafted: DraftedOutputs | None  # only if late rows may have drafts


class Unsampled(NamedTuple):
    """What a step leaves of late rows for this program; fields as in StepOutputs."""

    logits: jax.Array
    kept: Kept


class LateKey(NamedTuple):
    """The key of the program that samples the late rows of steps of so many rows."""

    num_rows: int
    num_drafting: int = 0  # the most of them with drafts
    num_drafts: int = 0  # of a row

    def __str__(self) -> str:
        drafts = f" with {self.num_drafting}x{self.num_drafts} drafts" if self.num_drafts else ""
        return f"sample_late {self.num_rows}{drafts}"

    @property
    def num_places(self) -> int:
        """How many places have logits: one for each row, then those behind drafts."""
        return self.num_rows + self.num_drafting * self.num_drafts


def late_keys(plan: EnginePlan) -> set[LateKey]:
    """The keys of all these programs that an engine needs."""
    return {late_key(plan, bucket) for bucket in plan.buckets} if plan.samples_late else set()


def late_key(plan: EnginePlan, bucket: Bucket) -> LateKey:
    """The key of the program for steps of such a bucket."""
    if bucket.decode_only or not plan.verifies_late:
        return LateKey(bucket.num_rows)
    assert plan.speculation is not None
    num_drafting = min(bucket.num_rows, plan.speculation.max_rows)
    return LateKey(bucket.num_rows, num_drafting, plan.speculation.num_drafts)


class Tables(NamedTuple):
    """What sampling changes of the state."""

    tokens: Any
    slots: Any
    lengths: Any
    drafts: Any  # None if late rows have no drafts, or the program proposes none
    drafter: Any  # None if late rows have no drafts; without the caches of weights that draft
    states: tuple[States, ...]  # of layers with states, if rows of the step may have drafts

    @classmethod
    def of(cls, plan: EnginePlan, state: DeviceState, key: LateKey) -> "Tables":
        states: tuple[Any, ...] = ()
        if plan.verifies_states_late and key.num_drafts:
            states = tuple(its for its in state.caches if isinstance(its, tuple))
        tables = cls(state.tokens, state.slots, state.lengths, None, None, states)
        if not plan.verifies_late:  # the state may have drafts nevertheless
            return tables
        if plan.draft is None:
            return tables._replace(drafts=state.drafts, drafter=state.drafter)
        return tables._replace(drafter=dataclasses.replace(state.drafter, caches=()))

    def put_into(self, state: DeviceState) -> DeviceState:
        drafts, drafter = state.drafts, state.drafter
        if self.drafts is not None:
            drafts, drafter = self.drafts, self.drafter
        elif self.drafter is not None:
            drafter = dataclasses.replace(self.drafter, caches=drafter.caches)
        caches = state.caches
        if self.states:
            after = iter(self.states)
            caches = tuple(next(after) if isinstance(its, tuple) else its for its in caches)
        return dataclasses.replace(
            state,
            tokens=self.tokens,
            slots=self.slots,
            lengths=self.lengths,
            drafts=drafts,
            drafter=drafter,
            caches=caches,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class LateInputs:
    """The late rows of a step, in the places that they have there. In all other rows, and in
    padding, `samples` is not set."""

    slots: jax.Array  # i32 [R]
    samples: jax.Array  # bool [R]
    prompt_lens: jax.Array  # i32 [R]
    row_params: jax.Array  # i32 [R, columns]
    masks: jax.Array  # u32 [places, words]: a bit for each token, lowest first
    num_drafts: jax.Array | None  # i32 [R]: of all rows of the step
    drafts: jax.Array | None  # i32 [R, k]: that count, then NO_DRAFT


class LateLayout:
    """Where each field of LateInputs lies in the one buffer that the host uploads."""

    def __init__(self, key: LateKey, *, num_slots: int, num_param_columns: int, num_words: int):
        self._key = key
        self._num_slots = num_slots
        num_rows = key.num_rows
        shapes: dict[str, tuple[int, ...]] = {
            "slots": (num_rows,),
            "samples": (num_rows,),
            "slot_columns": (1 + num_param_columns, num_rows),  # of `SlotTable`
            "masks": (key.num_places, num_words),
        }
        if key.num_drafts:
            shapes |= {"num_drafts": (num_rows,), "drafts": (num_rows, key.num_drafts)}
        self._fields: dict[str, tuple[slice, tuple[int, ...]]] = {}
        self.size = 0
        for name, shape in shapes.items():
            end = self.size + math.prod(shape)
            self._fields[name] = (slice(self.size, end), shape)
            self.size = end

    def abstract(self) -> jax.ShapeDtypeStruct:
        """Shape of the packed buffer, for compiling."""
        return jax.ShapeDtypeStruct((self.size,), np.int32)

    def pack(self, schedule: Schedule, table: SlotTable, masks: LateMasks) -> np.ndarray:
        """Build the buffer of a step with late rows."""
        assert schedule.late_rows is not None, f"step {schedule.step} has no late rows"
        buffer = np.zeros(self.size, np.int32)
        view = {name: buffer[span].reshape(shape) for name, (span, shape) in self._fields.items()}
        rows, late = schedule.num_rows, schedule.late_rows
        view["slots"][:rows] = schedule.slots
        view["slots"][rows:] = self._num_slots
        view["samples"][late] = 1
        view["slot_columns"][:, :rows] = table.columns[schedule.slots].T
        # The logits may be padded; the masks of padding stay zero.
        num_words = masks.first.shape[1]
        view["masks"][late, :num_words] = masks.first
        if self._key.num_drafts:
            view["drafts"][...] = NO_DRAFT
            if schedule.num_drafts is not None:
                view["num_drafts"][:rows] = schedule.num_drafts
            if masks.drafts is not None:
                assert schedule.num_drafts is not None and masks.more is not None
                view["drafts"][late, : masks.drafts.shape[1]] = masks.drafts
                # The places behind drafts, as in `runner.verify`.
                drafting = np.flatnonzero(schedule.num_drafts)
                row, index = np.nonzero(masks.drafts != NO_DRAFT)
                group = np.searchsorted(drafting, late[row])
                places = self._key.num_rows + group * self._key.num_drafts + index
                view["masks"][places, :num_words] = masks.more
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
            num_drafts=field.get("num_drafts"),
            drafts=field.get("drafts"),
        )


def make_sample_late(plan: EnginePlan, layout: LateLayout) -> Callable[..., tuple[Tables, Left]]:
    """Make the program for steps of such a key. The caller donates the tables."""

    def sample_late(
        tables: Tables, left: Left, unsampled: Unsampled, packed: jax.Array
    ) -> tuple[Tables, Left]:
        """Sample into the tables, which are those after the step: a row's length is that up to its
        newest token."""
        inputs = layout.unpack(packed)
        lengths = tables.lengths.at[inputs.slots].get(mode="fill", fill_value=0)
        with jax.named_scope("sample_late"):
            its = _verify(plan, inputs, unsampled.logits, lengths, tables)
        tables = tables._replace(tokens=its.table, slots=its.slots)

        def merged(new: jax.Array, old: jax.Array) -> jax.Array:
            late = jnp.repeat(inputs.samples, len(new) // len(inputs.samples))
            return jnp.where(late.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        drafted = None
        if left.drafted is not None:
            lengths += its.num_accepted
            ends = Ends(its.tokens, its.num_accepted, lengths)
            kept = jnp.where(inputs.samples, inputs.slots, plan.max_num_seqs)
            tables = tables._replace(lengths=tables.lengths.at[kept].set(lengths, mode="drop"))
            if tables.states:
                tables = tables._replace(
                    states=_states(plan, inputs, tables.states, unsampled.kept, its.num_accepted)
                )
            tables, num_proposed, proposals = _go_on(plan, inputs, ends, tables)
            drafted = DraftedOutputs(
                figures=merged(its.figures(num_proposed), left.drafted.figures),
                logprobs=jax.tree.map(merged, its.more_logprobs, left.drafted.logprobs),
                proposals=proposals,
            )
        return tables, Left(
            tokens=merged(its.tokens[:, 0], left.tokens),
            logprobs=jax.tree.map(merged, its.logprobs, left.logprobs),
            drafted=drafted,
        )

    return sample_late


def _states(
    plan: EnginePlan,
    inputs: LateInputs,
    states: tuple[States, ...],
    kept: Kept,
    num_accepted: jax.Array,
) -> tuple[States, ...]:
    """The states of layers after the drafts of late rows that are right."""
    assert inputs.num_drafts is not None and plan.state_ops is not None
    assert plan.speculation is not None
    # As in `prepare_rows` of the step.
    most, num_rows = plan.speculation.max_rows, len(inputs.slots)
    (rows,) = jnp.nonzero(inputs.num_drafts > 0, size=most, fill_value=num_rows)
    mesh = plan.stages[0].mesh
    return tuple(go_on(states, kept, plan.state_ops, mesh, inputs.slots, rows, num_accepted))


def _go_on(
    plan: EnginePlan, inputs: LateInputs, ends: Ends, tables: Tables
) -> tuple[Tables, jax.Array, jax.Array | None]:
    """Note for what drafts where the late rows have come to. Return also how many drafts it
    proposes for each, and which, if it proposes."""
    assert plan.speculation is not None
    none, slots, accepted = jnp.zeros_like(ends.lengths), inputs.slots, ends.num_accepted
    if plan.draft is None:
        its = Proposing(plan, make_drafter(plan.speculation)).propose(
            slots, inputs.samples, ends, tables.drafts, tables.drafter
        )
        tables = tables._replace(drafts=its.table, drafter=its.drafter)
        return tables, its.num_proposed, its.drafts
    if inputs.num_drafts is None:
        return tables, none, None
    if plan.draft_head is not None:
        drafter = draft_head.note_verified(plan, tables.drafter, slots, inputs.num_drafts, accepted)
    else:
        drafter = draft_model.note_verified(tables.drafter, slots, accepted, ends.tokens)
    return tables._replace(drafter=drafter), none, None


def _verify(
    plan: EnginePlan, inputs: LateInputs, logits: jax.Array, lengths: jax.Array, tables: Tables
) -> Verified:
    """Sample the late rows, and accept their drafts, if they may have some."""
    if inputs.num_drafts is None or inputs.drafts is None:
        its = sample_rows(
            plan,
            inputs,
            logits,
            context_lens=lengths,
            tokens=tables.tokens,
            slots=tables.slots,
            masks=inputs.masks,
        )
        none = jnp.zeros_like(lengths)
        return Verified(its.tokens, its.slots, its.of_rows[:, None], none, its.logprobs, None)
    return verify(
        plan,
        inputs,
        find_places(plan, inputs.num_drafts, lengths),
        inputs.num_drafts,
        inputs.drafts,
        logits,
        first=lengths,
        tokens=tables.tokens,
        slots=tables.slots,
        masks=inputs.masks,
    )

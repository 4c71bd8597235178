"""A second model that drafts, on the device.

At the begin of a step the draft model goes ahead of each row that has drafts: token by token, with
the row's own sampling parameters and noise, in the blocks that the row has for its drafts. Then the
step verifies them. So a step in which no row has drafts runs nothing of the draft model, and
programs for decodes do not contain it.

A round reads two tokens of each row, the newest and the one before it, and drafts the next. What a
row has drafted before is known to its caches if it was accepted, except for the last draft: so the
token before the newest may be new to them, and no earlier one is. Reading a token again changes
nothing. All rounds are alike, so a program has the draft model once.

The text before that is read by a program of its own (`make_read`), which the host dispatches before
the step in which a request's first drafts are made, or its first ones after steps without any.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.ragged_paged_attention.api import SHORT_ROW, RaggedBatch

from jaxllm.cache_groups import window_of
from jaxllm.layers.context import StepContext
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.runner.drafting import AheadRows, Ends, Forward, Round, draft_in_rounds
from jaxllm.runner.inputs import PADDING_TOKEN, StepInputs, table_row
from jaxllm.runner.state import DeviceState, DraftModelState
from jaxllm.scheduler.schedule import DraftReads


class _Carried(NamedTuple):
    caches: tuple[jax.Array, ...]
    before: jax.Array  # i32 [R]: the token before the newest


@dataclass(frozen=True)
class ModelDrafting:
    """Drafts by a second model."""

    plan: EnginePlan
    model: Any
    taps: tuple[int, ...] = ()

    def ahead(self, rows: AheadRows, state: DeviceState) -> DeviceState:
        drafter: DraftModelState = state.drafter

        def carried(slots: jax.Array) -> _Carried:
            return _Carried(drafter.caches, drafter.before.at[slots].get(mode="fill", fill_value=0))

        def guess(rows: Round, its: _Carried) -> tuple[jax.Array, _Carried]:
            num_in = jnp.sum(rows.is_in, dtype=jnp.int32)
            tokens = jnp.stack([its.before, rows.newest], axis=1)
            hidden, caches = _run(
                self.plan,
                self.model,
                its.caches,
                state.block_tables,
                token_ids=jnp.where(rows.is_in[:, None], tokens, PADDING_TOKEN).reshape(-1),
                positions=jnp.maximum(rows.ends[:, None] - jnp.array([2, 1]), 0).reshape(-1),
                query_starts=2 * jnp.minimum(jnp.arange(len(rows.slots) + 1), num_in),
                context_lens=rows.ends,
                slots=rows.slots,
                num_decodes=jnp.int32(0),
                num_short=num_in,
            )
            return self.model.compute_logits(hidden[1::2]), _Carried(caches, rows.newest)

        state, its = draft_in_rounds(self.plan, rows, state, carried, guess)
        drafter = dataclasses.replace(drafter, caches=its.caches)
        return dataclasses.replace(state, drafter=drafter)

    def after(
        self, inputs: StepInputs, forward: Forward, ends: Ends, state: DeviceState
    ) -> tuple[DeviceState, jax.Array]:
        """Note for each row the token before the newest."""
        num_drafts = 0 if inputs.num_drafts is None else inputs.num_drafts
        last = forward.token_ids.at[inputs.query_starts[1:] - 1 - num_drafts].get(mode="clip")
        known = jnp.concatenate([last[:, None], ends.tokens], axis=1)
        before = jnp.take_along_axis(known, ends.num_accepted[:, None], axis=1)[:, 0]
        drafter: DraftModelState = state.drafter
        noted = drafter.before.at[inputs.slots].set(before, mode="drop")
        state = dataclasses.replace(state, drafter=dataclasses.replace(drafter, before=noted))
        return state, jnp.zeros_like(ends.lengths)


def note_verified(
    drafter: DraftModelState, slots: jax.Array, num_accepted: jax.Array, tokens: jax.Array
) -> DraftModelState:
    """Note the token before the newest of late rows whose drafts are verified now: `tokens` are
    those of `Ends`. The step has noted the one before the drafts."""
    num_slots = len(drafter.before)
    index = jnp.maximum(num_accepted - 1, 0)
    before = jnp.take_along_axis(tokens, index[:, None], axis=1)[:, 0]
    noted = drafter.before.at[jnp.where(num_accepted > 0, slots, num_slots)].set(
        before, mode="drop"
    )
    return dataclasses.replace(drafter, before=noted)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadInputs:
    """What the draft model reads; fields as in StepInputs, and `starts` are positions."""

    token_ids: jax.Array  # i32 [T]
    token_rows: jax.Array  # i32 [T]
    query_starts: jax.Array  # i32 [R + 1]
    num_decodes: jax.Array  # i32 []
    num_short: jax.Array  # i32 []
    slots: jax.Array  # i32 [R]
    starts: jax.Array  # i32 [R]


class ReadLayout:
    """Where each field of ReadInputs lies in the one buffer that the host uploads."""

    def __init__(self, num_tokens: int, *, num_rows: int, num_slots: int):
        self.num_tokens = num_tokens
        self._num_rows = num_rows = min(num_rows, num_tokens)
        self._num_slots = num_slots
        shapes = {
            "token_ids": (num_tokens,),
            "token_rows": (num_tokens,),
            "query_starts": (num_rows + 1,),
            "num_decodes": (),
            "num_short": (),
            "slots": (num_rows,),
            "starts": (num_rows,),
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

    def pack(self, reads: DraftReads) -> np.ndarray:
        """Build the buffer."""
        buffer = np.zeros(self.size, np.int32)
        view = {name: buffer[span].reshape(shape) for name, (span, shape) in self._fields.items()}
        rows, tokens = len(reads.slots), len(reads.token_ids)
        view["token_ids"][:tokens] = reads.token_ids
        view["token_ids"][tokens:] = PADDING_TOKEN
        view["token_rows"][:tokens] = np.repeat(np.arange(rows, dtype=np.int32), reads.num_tokens)
        view["token_rows"][tokens:] = self._num_rows - 1
        np.cumsum(reads.num_tokens, out=view["query_starts"][1 : rows + 1])
        view["query_starts"][rows + 1 :] = tokens
        num_decodes, num_up_to_short = np.searchsorted(
            reads.num_tokens, [1, SHORT_ROW], side="right"
        )
        view["num_decodes"][...] = num_decodes
        view["num_short"][...] = num_up_to_short - num_decodes
        view["slots"][:rows] = reads.slots
        view["slots"][rows:] = self._num_slots
        view["starts"][:rows] = reads.starts
        return buffer

    def unpack(self, buffer: jax.Array) -> ReadInputs:
        """Cut the buffer into fields; traced."""
        return ReadInputs(
            **{name: buffer[span].reshape(shape) for name, (span, shape) in self._fields.items()}
        )


def make_read(
    plan: EnginePlan, make_model: Callable[[list[jax.Array]], Any], layout: ReadLayout
) -> Callable[..., DeviceState]:
    """Make the program in which the draft model reads so many tokens: read(weights, state, packed)
    -> state. `make_model` makes the draft model of the weights that a step takes. The caller
    donates the state."""

    def read(weights: list[jax.Array], state: DeviceState, packed: jax.Array) -> DeviceState:
        inputs = layout.unpack(packed)
        drafter: DraftModelState = state.drafter
        num_tokens = jnp.diff(inputs.query_starts)
        offsets = jnp.arange(layout.num_tokens) - inputs.query_starts[inputs.token_rows]
        real = jnp.arange(layout.num_tokens) < inputs.query_starts[-1]
        with jax.named_scope("read"):
            _, caches = _run(
                plan,
                make_model(weights),
                drafter.caches,
                state.block_tables,
                token_ids=inputs.token_ids,
                positions=jnp.where(real, inputs.starts[inputs.token_rows] + offsets, 0),
                query_starts=inputs.query_starts,
                context_lens=inputs.starts + num_tokens,
                slots=inputs.slots,
                num_decodes=inputs.num_decodes,
                num_short=inputs.num_short,
            )
        return dataclasses.replace(state, drafter=dataclasses.replace(drafter, caches=caches))

    return read


def _run(
    plan: EnginePlan,
    model: Any,
    caches: tuple[jax.Array, ...],
    block_tables: jax.Array,
    *,
    token_ids: jax.Array,
    positions: jax.Array,
    query_starts: jax.Array,
    context_lens: jax.Array,
    slots: jax.Array,
    num_decodes: jax.Array,
    num_short: jax.Array,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Run the draft model over a ragged batch. Its layers keep all tokens, in the blocks of the
    group that does, which is the first."""
    batch = RaggedBatch(
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables.at[table_row(0, slots, plan.max_num_seqs)].get(
            mode="fill", fill_value=0
        ),
        num_decodes=num_decodes,
        num_short=num_short,
        block_size=plan.block_size,
        decode_only=False,
    )
    configs = model.attention_configs
    context = StepContext.prepare(
        dict.fromkeys(map(window_of, configs), batch),
        configs,
        num_tokens=len(token_ids),
        backend=plan.attention,
        mesh=plan.stages[0].mesh,
        add_norm=plan.add_norm,
    )
    return model(token_ids, positions, caches, context)

"""A head that drafts, on the device.

A head has an *entry* for each token of a text but the last: from the model's hidden state there and
the token that follows, it guesses the token after that one. Its layer attends to earlier entries.
So it must read every text, and does it at the end of each step, over the step's own tokens and in
the blocks that these have. It writes keys and values only: nobody asks what it guesses there, so
the compiler leaves its feed-forward network out. Keys of drafts that are refused are written over,
as those of the model are.

At the begin of a step with drafts the head goes ahead. Its first round reads the newest token with
the model's hidden state before it, which the state keeps for each slot. Later rounds read the last
draft with the head's own hidden state. The first round writes what the step before has written
already, unless the row sampled late; so all rounds are alike.

The last entry of a cached prefix is that of the token which followed it in another text. It may be
wrong here, and costs a guess at most.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch

from jaxllm.cache_groups import window_of
from jaxllm.layers.context import StepContext
from jaxllm.layers.rope import rotary
from jaxllm.models.draft_head import DraftHead
from jaxllm.models.specs import Caches
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.runner.drafting import (
    AheadRows,
    Ends,
    Forward,
    Round,
    draft_in_rounds,
    rows_with_drafts,
)
from jaxllm.runner.inputs import PADDING_TOKEN, StepInputs, table_row
from jaxllm.runner.state import DeviceState, DraftHeadState


def note_verified(
    plan: EnginePlan,
    drafter: DraftHeadState,
    slots: jax.Array,
    num_drafts: jax.Array,
    num_accepted: jax.Array,
) -> DraftHeadState:
    """Note the hidden state before the newest token of late rows whose drafts are verified now. The
    step has noted the one before the drafts, and those behind each of them."""
    assert drafter.behind is not None
    rows = rows_with_drafts(plan, num_drafts)
    accepted = num_accepted.at[rows].get(mode="fill", fill_value=0)
    hidden = drafter.behind[jnp.arange(len(rows)), jnp.maximum(accepted - 1, 0)]
    slots = slots.at[rows].get(mode="fill", fill_value=plan.max_num_seqs)
    kept = jnp.where(accepted > 0, slots, plan.max_num_seqs)
    return dataclasses.replace(drafter, hidden=drafter.hidden.at[kept].set(hidden, mode="drop"))


class _Carried(NamedTuple):
    caches: Caches
    hidden: jax.Array  # [R, D]: of the model before the newest token, then of the head


@dataclass(frozen=True)
class HeadDrafting:
    """Drafts by a head; `model` is a `DecoderForCausalLM`."""

    plan: EnginePlan
    model: Any
    head: DraftHead

    @property
    def taps(self) -> tuple[int, ...]:
        return self.head.spec.taps

    def ahead(self, rows: AheadRows, state: DeviceState) -> DeviceState:
        drafter: DraftHeadState = state.drafter

        def carried(slots: jax.Array) -> _Carried:
            return _Carried(drafter.caches, drafter.hidden.at[slots].get(mode="fill", fill_value=0))

        def guess(rows: Round, its: _Carried) -> tuple[jax.Array, _Carried]:
            # The entry of the token before the newest.
            positions = jnp.maximum(rows.ends - 2, 0)
            hidden, caches = self._read(
                jnp.where(rows.is_in, rows.newest, PADDING_TOKEN),
                its.hidden,
                positions,
                its.caches,
                self._decodes(rows, state.block_tables),
            )
            logits = self.head.compute_logits(hidden, self.model.compute_logits)
            return logits, _Carried(caches, hidden)

        state, its = draft_in_rounds(self.plan, rows, state, carried, guess)
        drafter = dataclasses.replace(drafter, caches=its.caches)
        return dataclasses.replace(state, drafter=drafter)

    def after(
        self, inputs: StepInputs, forward: Forward, ends: Ends, state: DeviceState
    ) -> tuple[DeviceState, jax.Array]:
        num_drafts = 0 if inputs.num_drafts is None else inputs.num_drafts
        assert inputs.next_tokens is not None, "the plan has no head"
        following = jnp.where(inputs.samples, ends.newest, inputs.next_tokens)
        # The last token of each row that counts. Behind it are refused drafts.
        last = inputs.query_starts[1:] - 1 - num_drafts + ends.num_accepted
        last = jnp.where(ends.lengths > 0, last, len(forward.token_ids))
        # All drafts of a late row may still count.
        end = last if inputs.num_drafts is None else last + jnp.where(inputs.samples, 0, num_drafts)
        tokens = jnp.roll(forward.token_ids, -1).at[end].set(following, mode="drop")
        with jax.named_scope("read"):
            hidden = self.head.enter(forward.hidden, forward.tapped)
            drafter: DraftHeadState = state.drafter
            positions = forward.context.positions
            assert positions is not None
            _, caches = self._read(
                jnp.where(tokens < 0, PADDING_TOKEN, tokens),
                hidden,
                positions,
                drafter.caches,
                forward.context,
            )
            kept = hidden.at[last].get(mode="fill", fill_value=0)
            behind = drafter.behind
            if behind is not None and inputs.num_drafts is not None:
                rows = rows_with_drafts(self.plan, inputs.num_drafts)
                first = last.at[rows].get(mode="fill", fill_value=len(hidden))[:, None] + 1
                its = hidden.at[first + jnp.arange(behind.shape[1])].get(mode="fill", fill_value=0)
                behind = behind.at[: len(rows)].set(its)
        drafter = DraftHeadState(
            caches=caches,
            hidden=drafter.hidden.at[inputs.slots].set(kept, mode="drop"),
            behind=behind,
        )
        return dataclasses.replace(state, drafter=drafter), jnp.zeros_like(ends.lengths)

    def _read(
        self,
        tokens: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        caches: Caches,
        context: StepContext,
    ) -> tuple[jax.Array, Caches]:
        """Read entries: hidden states, and the tokens after them."""
        rope = self.head.spec.layer.rope
        context = dataclasses.replace(
            context, positions=positions, rotary=rope and rotary(rope, positions)
        )
        return self.head(self.model.model.embed(tokens), hidden, caches, context)

    def _decodes(self, rows: Round, block_tables: jax.Array) -> StepContext:
        """The context of a batch of one entry for each row."""
        plan, configs = self.plan, self.head.attention_configs
        groups = [group.window for group in plan.cache_groups]
        num_in = jnp.sum(rows.is_in, dtype=jnp.int32)
        num_rows = len(rows.slots)

        def batch(window: Any) -> RaggedBatch:
            tables = table_row(groups.index(window), rows.slots, plan.max_num_seqs)
            return RaggedBatch(
                query_starts=jnp.minimum(jnp.arange(num_rows + 1, dtype=jnp.int32), num_in),
                context_lens=jnp.maximum(rows.ends - 1, 0),
                block_tables=block_tables.at[tables].get(mode="fill", fill_value=0),
                num_decodes=num_in,
                block_size=plan.block_size,
                decode_only=True,
            )

        return StepContext.prepare(
            {window: batch(window) for window in dict.fromkeys(map(window_of, configs))},
            configs,
            num_tokens=num_rows,
            backend=plan.attention,
            mesh=plan.stages[0].mesh,
            add_norm=plan.add_norm,
        )

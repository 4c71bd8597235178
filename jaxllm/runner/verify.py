"""The end of a step in an engine that speculates: verify the drafts, then propose the next ones.

A row with d drafts computes 1 + d tokens: the newest one, and the drafts behind it. The model
samples after each of them. The noise of a position does not depend on how it is reached, so the
token after the newest one is the token of plain decoding. If it equals the first draft, the token
after this draft is that of plain decoding as well, and so on. The rest is forgotten: the next row
begins behind the last token that counts, and writes over its keys and values. The states of
recurrent layers go on over the drafts that are right (`runner.verified_states`).

Late rows sample nothing here. Their drafts are verified in the second program (`runner.late`).

Only few rows may have drafts. So every mixed step samples after the last token of each row and, for
these few, after each draft: no second sampler for steps without drafts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxllm_kernels.sampler.api import LogprobOutput

from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.runner.drafting import Drafting, Ends, Forward, rows_with_drafts
from jaxllm.runner.inputs import StepInputs
from jaxllm.runner.outputs import DraftedOutputs, StepOutputs
from jaxllm.runner.sample_rows import SampledRows
from jaxllm.runner.state import DeviceState
from jaxllm.runner.verified_states import kept_of_drafts, verified_states
from jaxllm.sampling import row_params
from jaxllm.sampling.sampler import record_accepted, sample
from jaxllm.sampling.slot_state import SlotState
from jaxllm.scheduler.schedule import DRAFT_TOKEN, NO_TOKEN
from jaxllm.speculation.drafter import NO_DRAFT


def with_drafts(token_ids: jax.Array, inputs: StepInputs, state: DeviceState) -> jax.Array:
    """Put the slots' drafts in the places that the host has left for them. A draft that is missing
    becomes some token, which is not accepted."""
    assert state.drafts is not None
    place = jnp.arange(len(token_ids)) - inputs.query_starts[inputs.token_rows]
    slots = inputs.slots[inputs.token_rows]
    drafts = state.drafts.at[slots, place - 1].get(mode="fill", fill_value=0)
    return jnp.where(token_ids == DRAFT_TOKEN, jnp.maximum(drafts, 0), token_ids)


class Places(NamedTuple):
    """The places of a step that sample: first one of each row, behind its newest token, then those
    behind the drafts of the few rows that have some."""

    rows: jax.Array  # i32 [P]
    num_before: jax.Array  # i32 [P]: how many drafts of the row come before
    exist: jax.Array  # bool [P]
    drafting: jax.Array  # i32 [most]: the rows with drafts, then R

    def of_rows(self, x: jax.Array) -> jax.Array:
        """What is known of rows, by place."""
        return x.at[self.rows].get(mode="clip")


class Verified(NamedTuple):
    """What was sampled for the rows of a step."""

    table: jax.Array  # i32 [S]: the last token of each slot
    slots: SlotState
    tokens: jax.Array  # i32 [R, 1 + k]; NO_TOKEN if the logits are not finite
    num_accepted: jax.Array  # i32 [R]
    logprobs: LogprobOutput  # [R, 1 + n], of the first tokens
    more_logprobs: LogprobOutput | None  # [R * k, 1 + n]; None if k is 0

    def figures(self, proposed: jax.Array) -> jax.Array:
        """As in DraftedOutputs."""
        counts = jnp.stack([proposed, self.num_accepted], axis=1)
        return jnp.concatenate([counts, self.tokens[:, 1:]], axis=1)


def verify_and_propose(
    plan: EnginePlan,
    model: Any,
    drafting: Drafting,
    inputs: StepInputs,
    context_lens: jax.Array,
    forward: Forward,
    state: DeviceState,
    slices: dict[str, dict[str, jax.Array]],
    sample_last: Callable[[], tuple[DeviceState, StepOutputs]],
) -> tuple[DeviceState, StepOutputs]:
    """End a step. `slices` are those of its features. `sample_last` samples one token for each row,
    after the row's last one: the same in a program without rows with drafts."""
    if inputs.num_drafts is None:
        state, outputs = sample_last()
        none = jnp.zeros_like(context_lens)
        ends = Ends(outputs.tokens[:, None], none, context_lens)
        state, proposed = drafting.after(inputs, forward, ends, state)
        figures = jnp.stack([proposed, none], axis=1)
        drafted = DraftedOutputs(figures=figures, logprobs=None)
        return state, dataclasses.replace(outputs, drafted=drafted)

    assert state.tokens is not None and state.slots is not None and state.drafts is not None
    first = context_lens - inputs.num_drafts
    places = find_places(plan, inputs.num_drafts, first)
    drafts = state.drafts.at[inputs.slots].get(mode="fill", fill_value=NO_DRAFT)
    before = inputs.query_starts[1:] - 1 - inputs.num_drafts
    with jax.named_scope("verify"):
        read = places.of_rows(before) + places.num_before
        read = jnp.where(places.exist, read, len(forward.hidden))
        logits = model.compute_logits(forward.hidden.at[read].get(mode="fill", fill_value=0))
        sampled = verify(
            plan,
            inputs,
            places,
            inputs.num_drafts,
            drafts,
            logits,
            first=first,
            tokens=state.tokens,
            slots=state.slots,
        )
    lengths = first + sampled.num_accepted
    kept = kept_of_drafts(state.caches) if plan.verifies_states_late else ()
    assert _shapes(kept) == _shapes(plan.stages[0].between.kept), kept
    state = dataclasses.replace(
        state,
        tokens=sampled.table,
        slots=sampled.slots,
        lengths=state.lengths.at[inputs.slots].set(lengths, mode="drop"),
        caches=verified_states(state.caches, forward.context, sampled.num_accepted),
    )
    ends = Ends(sampled.tokens, sampled.num_accepted, lengths)
    state, proposed = drafting.after(inputs, forward, ends, state)
    left = None
    if plan.leaves_logits:
        left = logits if plan.verifies_late else logits[: len(first)]
    return state, StepOutputs(
        tokens=sampled.tokens[:, 0],
        logprobs=sampled.logprobs,
        slices=slices,
        logits=left,
        drafted=DraftedOutputs(figures=sampled.figures(proposed), logprobs=sampled.more_logprobs),
        kept=kept,
    )


def _shapes(arrays: Any) -> list[tuple[Any, Any]]:
    return [(array.shape, array.dtype) for array in jax.tree.leaves(arrays)]


def find_places(plan: EnginePlan, num_drafts: jax.Array, first: jax.Array) -> Places:
    """Find the places of rows with so many drafts. `first` i32 [R] is how many tokens each row has
    up to its newest; 0 for padding."""
    assert plan.speculation is not None
    num_rows, k = len(num_drafts), plan.speculation.num_drafts
    drafting = rows_with_drafts(plan, num_drafts)
    most = len(drafting)
    rows = jnp.concatenate([jnp.arange(num_rows), jnp.repeat(drafting, k)])
    index = jnp.concatenate([jnp.zeros(num_rows, jnp.int32), jnp.tile(jnp.arange(1, k + 1), most)])
    last, length = (x.at[rows].get(mode="clip") for x in (num_drafts, first))
    return Places(rows, index, (rows < num_rows) & (index <= last) & (length > 0), drafting)


def verify(
    plan: EnginePlan,
    rows: SampledRows,
    places: Places,
    num_drafts: jax.Array,
    drafts: jax.Array,
    logits: jax.Array,
    *,
    first: jax.Array,
    tokens: jax.Array,
    slots: SlotState,
    masks: jax.Array | None = None,
) -> Verified:
    """Sample at all places, from their logits f32 [P, V], and accept the drafts, i32 [R, k], that
    are sampled. `tokens` and `slots` are the tables of the state, `masks` u32 [P, words] what the
    places may sample."""
    num_rows, k = drafts.shape
    drafts = jnp.where(jnp.arange(k) < num_drafts[:, None], drafts, NO_DRAFT)
    of_rows = places.of_rows
    positions = of_rows(first) + places.num_before
    sampled = sample(
        logits,
        row_params.decode(of_rows(rows.row_params), plan.logits_processors),
        slots=jnp.where(places.exist, of_rows(rows.slots), plan.max_num_seqs),
        samples=places.exist & of_rows(rows.samples),
        output_index=positions - of_rows(rows.prompt_lens),
        positions=positions,
        state=slots,
        num_logprobs=plan.step_logprobs,
        layout=plan.sampling,
        processors=plan.logits_processors,
        vocab_size=plan.architecture.vocab_size,
        masks=masks,
        pending=jnp.where(jnp.arange(k) < places.num_before[:, None], of_rows(drafts), NO_TOKEN),
    )

    def by_row(x: jax.Array) -> jax.Array:
        """The values after drafts, [R, k, ...]."""
        more = x[num_rows:].reshape(len(places.drafting), k, *x.shape[1:])
        zeros = jnp.zeros((num_rows, *more.shape[1:]), x.dtype)
        return zeros.at[places.drafting].set(more, mode="drop")

    def all_of_row(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:num_rows, None], by_row(x)], axis=1)

    its, is_valid = all_of_row(sampled.tokens), all_of_row(sampled.is_valid)
    right = (its[:, :k] == drafts) & (drafts != NO_DRAFT) & is_valid[:, :k]
    right &= rows.samples[:, None]
    num_accepted = jnp.sum(jnp.cumprod(right, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    num_tokens = jnp.where(rows.samples, 1 + num_accepted, 0)
    params = row_params.decode(rows.row_params, plan.logits_processors)
    kept = jnp.where(rows.samples, rows.slots, plan.max_num_seqs)
    newest = jnp.take_along_axis(its, num_accepted[:, None], axis=1)[:, 0]
    return Verified(
        tokens.at[kept].set(newest, mode="drop"),
        record_accepted(slots, its, num_tokens, rows.slots, params.flags, plan.sampling),
        jnp.where(is_valid, its, NO_TOKEN),
        num_accepted,
        jax.tree.map(lambda x: x[:num_rows], sampled.logprobs),
        jax.tree.map(lambda x: by_row(x).reshape(-1, *x.shape[1:]), sampled.logprobs),
    )

"""The end of a step in an engine that speculates: verify the drafts, then propose the next ones.

A row with d drafts computes 1 + d tokens: the newest one, and the drafts behind it. The model
samples after each of them. The noise of a position does not depend on how it is reached, so the
token after the newest one is the token of plain decoding. If it equals the first draft, the token
after this draft is that of plain decoding as well, and so on. The rest is forgotten: the next row
begins behind the last token that counts, and writes over its keys and values.

Only few rows may have drafts. So every mixed step samples after the last token of each row and, for
these few, after each draft: no second sampler for steps without drafts.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.runner.drafting import Drafting, Ends, Forward
from jaxllm.runner.inputs import StepInputs
from jaxllm.runner.outputs import DraftedOutputs, StepOutputs
from jaxllm.runner.state import DeviceState
from jaxllm.sampling import row_params
from jaxllm.sampling.logprobs import LogprobOutput
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


class _Sampled(NamedTuple):
    """What was sampled for the rows of a step."""

    table: jax.Array  # i32 [S]: the last token of each slot
    slots: SlotState
    tokens: jax.Array  # i32 [R, 1 + k]; NO_TOKEN if the logits are not finite
    num_accepted: jax.Array  # i32 [R]
    logprobs: LogprobOutput  # [R, 1 + n], of the first tokens
    more_logprobs: LogprobOutput  # [R * k, 1 + n]
    logits: jax.Array | None  # as in StepOutputs


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

    sampled = _verify(plan, model, inputs, context_lens, forward.hidden, state)
    lengths = context_lens - inputs.num_drafts + sampled.num_accepted
    state = dataclasses.replace(
        state,
        tokens=sampled.table,
        slots=sampled.slots,
        lengths=state.lengths.at[inputs.slots].set(lengths, mode="drop"),
    )
    ends = Ends(sampled.tokens, sampled.num_accepted, lengths)
    state, proposed = drafting.after(inputs, forward, ends, state)
    figures = jnp.concatenate(
        [proposed[:, None], sampled.num_accepted[:, None], sampled.tokens[:, 1:]], axis=1
    )
    return state, StepOutputs(
        tokens=sampled.tokens[:, 0],
        logprobs=sampled.logprobs,
        slices=slices,
        logits=sampled.logits,
        drafted=DraftedOutputs(figures=figures, logprobs=sampled.more_logprobs),
    )


def _verify(
    plan: EnginePlan,
    model: Any,
    inputs: StepInputs,
    context_lens: jax.Array,
    hidden: jax.Array,
    state: DeviceState,
) -> _Sampled:
    """Sample after each token of the rows with drafts, and after the last one of the others."""
    assert plan.speculation is not None and inputs.num_drafts is not None
    assert state.tokens is not None and state.slots is not None and state.drafts is not None
    num_rows, k = len(context_lens), plan.speculation.num_drafts
    most = min(num_rows, plan.speculation.max_rows)
    drafting = jnp.nonzero(inputs.num_drafts > 0, size=most, fill_value=num_rows)[0]
    # The places that sample: first one of each row, then those after the drafts. `index` counts
    # the drafts of the row up to the place.
    rows = jnp.concatenate([jnp.arange(num_rows), jnp.repeat(drafting, k)])
    index = jnp.concatenate([jnp.zeros(num_rows, jnp.int32), jnp.tile(jnp.arange(1, k + 1), most)])

    def of_rows(x: jax.Array) -> jax.Array:
        return x.at[rows].get(mode="clip")

    refused_at_most = of_rows(inputs.num_drafts) - index
    exists = (rows < num_rows) & (refused_at_most >= 0) & (of_rows(context_lens) > 0)
    last = of_rows(inputs.query_starts[1:]) - 1 - refused_at_most
    drafts = state.drafts.at[inputs.slots].get(mode="fill", fill_value=NO_DRAFT)
    drafts = jnp.where(jnp.arange(k) < inputs.num_drafts[:, None], drafts, NO_DRAFT)
    positions = of_rows(context_lens) - refused_at_most
    with jax.named_scope("verify"):
        places = jnp.where(exists, last, len(hidden))
        logits = model.compute_logits(hidden.at[places].get(mode="fill", fill_value=0))
        sampled = sample(
            logits,
            row_params.decode(of_rows(inputs.row_params), plan.logits_processors),
            slots=jnp.where(exists, of_rows(inputs.slots), plan.max_num_seqs),
            samples=exists & of_rows(inputs.samples),
            output_index=positions - of_rows(inputs.prompt_lens),
            positions=positions,
            state=state.slots,
            num_logprobs=plan.step_logprobs,
            layout=plan.sampling,
            processors=plan.logits_processors,
            vocab_size=plan.architecture.vocab_size,
            pending=jnp.where(jnp.arange(k) < index[:, None], of_rows(drafts), NO_TOKEN),
        )

    def by_row(x: jax.Array) -> jax.Array:
        """The values after drafts, [R, k, ...]."""
        more = x[num_rows:].reshape(most, k, *x.shape[1:])
        return jnp.zeros((num_rows, *more.shape[1:]), x.dtype).at[drafting].set(more, mode="drop")

    def all_of_row(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x[:num_rows, None], by_row(x)], axis=1)

    tokens, is_valid = all_of_row(sampled.tokens), all_of_row(sampled.is_valid)
    right = (tokens[:, :k] == drafts) & (drafts != NO_DRAFT) & is_valid[:, :k]
    num_accepted = jnp.sum(jnp.cumprod(right, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    num_tokens = jnp.where(inputs.samples, 1 + num_accepted, 0)
    params = row_params.decode(inputs.row_params, plan.logits_processors)
    kept = jnp.where(inputs.samples, inputs.slots, plan.max_num_seqs)
    newest = jnp.take_along_axis(tokens, num_accepted[:, None], axis=1)[:, 0]
    return _Sampled(
        state.tokens.at[kept].set(newest, mode="drop"),
        record_accepted(state.slots, tokens, num_tokens, inputs.slots, params.flags),
        jnp.where(is_valid, tokens, NO_TOKEN),
        num_accepted,
        jax.tree.map(lambda x: x[:num_rows], sampled.logprobs),
        jax.tree.map(lambda x: by_row(x).reshape(-1, *x.shape[1:]), sampled.logprobs),
        logits[:num_rows] if plan.leaves_logits else None,
    )

"""The one function that runs on the device: a whole step, from token ids to sampled tokens.

    step(weights, state, packed) -> (state, StepOutputs)

In a pipeline each stage runs its part of the step. Each later stage gets the hidden states of the
stage before. The first stage gets the last stage's table of sampled tokens.

    step(weights, state, packed, arrived) -> (state, StageOutputs, or StepOutputs at the end)

Steps whose rows may have adapters get the arrays of these as one more argument. An engine that
pools has vectors of prompts at the end of a step, in place of sampled tokens.

The step is traced once per bucket. Every sampling parameter is in that program, under conditionals
on the step's rows, so nothing is compiled later.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch

from jaxllm.cache_groups import Window
from jaxllm.layers.context import GivenEmbeddings, StepContext
from jaxllm.lora.device import Adapters, adapted
from jaxllm.media.slice import NAME as IMAGES
from jaxllm.models.base import Model
from jaxllm.models.draft_head import DraftHead
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.plan.stages import StagePlan
from jaxllm.pooler_config import Pooling
from jaxllm.pooling.device import pool_rows
from jaxllm.pooling.slice import ROWS
from jaxllm.prompt_embeds.slice import NAME as EMBEDS
from jaxllm.runner.draft_head import HeadDrafting
from jaxllm.runner.draft_model import ModelDrafting
from jaxllm.runner.drafting import AheadRows, Drafting, Forward, Proposing
from jaxllm.runner.inputs import InputLayout, StepInputs, table_row
from jaxllm.runner.outputs import StageOutputs, StepOutputs
from jaxllm.runner.sample_rows import sample_rows
from jaxllm.runner.snapshots import load_states, store_states
from jaxllm.runner.state import DeviceState
from jaxllm.runner.verify import verify_and_propose, with_drafts
from jaxllm.scheduler.schedule import CARRIED_TOKEN, GO_ON, NO_TOKEN
from jaxllm.speculation.drafters import make_drafter


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The static part of a model or a head. With the weights it makes the module again."""

    graphdef: Any
    treedef: Any

    @classmethod
    def of(cls, model: Model | DraftHead) -> "ModelSpec":
        """Take the weights out of a model, concrete or abstract."""
        graphdef, state = nnx.split(model)
        return cls(graphdef, jax.tree.structure(state))

    @property
    def num_weights(self) -> int:
        return self.treedef.num_leaves

    def merge(self, weights: list[jax.Array]) -> Any:
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, weights))


Outputs = StepOutputs | StageOutputs
StepFunction = Callable[..., tuple[DeviceState, Outputs]]


def make_step(
    plan: EnginePlan,
    stage: StagePlan,
    spec: ModelSpec,
    layout: InputLayout,
    draft: ModelSpec | None = None,
) -> StepFunction:
    """Make the step of one bucket on one stage. The caller jits it and donates the state. The
    weights are those of the model, then those of what drafts, if there are any."""

    def step(
        weights: list[jax.Array],
        state: DeviceState,
        packed: jax.Array,
        arrived: jax.Array | None = None,
        adapters: Adapters | None = None,
    ) -> tuple[DeviceState, Outputs]:
        if not plan.counts_experts:
            return run(weights, state, packed, arrived, adapters)
        # Layers write to it, so that their results do not have it.
        counts = jax.new_ref(jnp.zeros(plan.experts_shape, jnp.int32))
        state, left = run(weights, state, packed, arrived, adapters, counts)
        return state, dataclasses.replace(left, expert_tokens=(jax.freeze(counts),))

    def run(
        weights: list[jax.Array],
        state: DeviceState,
        packed: jax.Array,
        arrived: jax.Array | None,
        adapters: Adapters | None,
        expert_tokens: Any = None,
    ) -> tuple[DeviceState, Outputs]:
        inputs = layout.unpack(packed)
        model = spec.merge(weights[: spec.num_weights])
        if adapters is not None:
            assert inputs.adapters is not None
            assert plan.adapters is not None
            slots = inputs.adapters[inputs.token_rows]
            model = adapted(model, adapters, slots, plan.adapters.op)
        head = plan.draft_head
        block_tables = update_block_tables(state.block_tables, inputs.block_updates)
        state = dataclasses.replace(state, block_tables=block_tables)
        state = load_states(stage, plan.state_ops, inputs, state)
        drafting = make_drafting(plan, model, draft and draft.merge(weights[spec.num_weights :]))
        context_lens = _context_lens(inputs, state.lengths)
        batches = {
            group.window: RaggedBatch(
                query_starts=inputs.query_starts,
                context_lens=context_lens,
                # Padding rows may get another row's table: they do not read it.
                block_tables=block_tables.at[table_row(index, inputs.slots, plan.max_num_seqs)].get(
                    mode="fill", fill_value=0
                ),
                num_decodes=inputs.num_decodes,
                num_short=inputs.num_short,
                last_seen=_last_seen(plan, group.window, inputs, context_lens),
                block_size=plan.block_size,
                decode_only=layout.bucket.decode_only,
            )
            for index, group in enumerate(plan.cache_groups)
        }
        context = StepContext.prepare(
            batches,
            model.attention_configs + (() if head is None else head.attention_configs),
            num_tokens=layout.bucket.num_tokens,
            backend=plan.attention,
            mesh=stage.mesh,
            add_norm=plan.add_norm,
            state_ops=plan.state_ops,
            slots=inputs.slots,
            num_slots=plan.max_num_seqs,
            num_drafts=inputs.num_drafts,
            most_drafts=(0, 0) if plan.speculation is None else plan.speculation.most_drafts,
        )
        context = dataclasses.replace(context, expert_tokens=expert_tokens)
        entering = arrived
        if stage.part.embeds:
            carried = state.tokens if arrived is None else arrived
            assert carried is not None
            entering = _token_ids(inputs, carried)
            if inputs.num_drafts is not None:
                assert drafting is not None
                newest = inputs.query_starts[1:] - 1 - inputs.num_drafts
                rows = AheadRows(
                    slots=inputs.slots,
                    # Late rows have theirs already (`runner.ahead`).
                    num_drafts=jnp.where(inputs.samples, inputs.num_drafts, 0),
                    lengths=context_lens - inputs.num_drafts,
                    newest=entering.at[newest].get(mode="clip"),
                    prompt_lens=inputs.prompt_lens,
                    row_params=inputs.row_params,
                )
                state = drafting.ahead(rows, state)
                entering = with_drafts(entering, inputs, state)
        positions = _positions(inputs, context_lens)
        if plan.num_given_rows:
            context = _with_given(context, inputs, state, positions)
        tapped = ()
        if drafting is None or not drafting.taps:
            hidden, caches = model(entering, positions, state.caches, context)
        else:
            hidden, tapped, caches = model.tapped(
                entering, positions, state.caches, context, drafting.taps
            )
        state = dataclasses.replace(state, caches=caches)
        if drafting is None:
            state = store_states(stage, plan.state_ops, inputs, state)
        if stage.part.has_head:
            slices = _compute_slices(layout, inputs, model, hidden)
            if plan.pooling is not None:
                return _pool(plan.pooling, model, inputs, context_lens, hidden, state, slices)
            if drafting is None:
                return _sample(plan, model, inputs, context_lens, hidden, state, slices)
            last = functools.partial(
                _sample, plan, model, inputs, context_lens, hidden, state, slices
            )
            assert entering is not None
            # The experts of a head that drafts are not counted.
            context = dataclasses.replace(context, positions=positions, expert_tokens=None)
            forward = Forward(entering, hidden, tapped, context)
            state, outputs = verify_and_propose(
                plan, model, drafting, inputs, context_lens, forward, state, slices, last
            )
            return store_states(stage, plan.state_ops, inputs, state), outputs
        return _set_lengths(state, inputs, context_lens), StageOutputs(hidden=hidden)

    return step


def _with_given(
    context: StepContext, inputs: StepInputs, state: DeviceState, positions: jax.Array
) -> StepContext:
    """Give layers the embeddings of images and of prompts, and the positions of tokens in and
    behind images."""
    slices = [its for name in (IMAGES, EMBEDS) if (its := inputs.slices.get(name)) is not None]
    for its in slices:
        if "offsets" in its:
            context = dataclasses.replace(context, rope_positions=positions + its["offsets"])
    rows = [its["rows"] for its in slices if "rows" in its]
    if not rows:
        return context
    assert state.given is not None
    # A token has one row at most, and no row is below all others.
    given = GivenEmbeddings(functools.reduce(jnp.maximum, rows), state.given)
    return dataclasses.replace(context, given=given)


def make_drafting(plan: EnginePlan, model: Any, drafts: Any) -> Drafting | None:
    """What drafts in the engine; `drafts` is the second model or the head, if there is one."""
    if plan.speculation is None:
        return None
    if plan.draft_head is not None:
        return HeadDrafting(plan, model, drafts)
    if plan.draft_model is not None:
        return ModelDrafting(plan, drafts)
    return Proposing(plan, make_drafter(plan.speculation))


def _sample(
    plan: EnginePlan,
    model: Any,
    inputs: StepInputs,
    context_lens: jax.Array,
    hidden: jax.Array,
    state: DeviceState,
    slices: dict[str, dict[str, jax.Array]],
) -> tuple[DeviceState, StepOutputs]:
    """The end of a step: from hidden states to tokens."""
    assert state.tokens is not None and state.slots is not None
    with jax.named_scope("sample"):
        last = jnp.where(context_lens > 0, inputs.query_starts[1:] - 1, len(hidden))
        # The hidden states of padding rows become zeros.
        logits = model.compute_logits(hidden.at[last].get(mode="fill", fill_value=0))
        its = sample_rows(
            plan,
            inputs,
            logits,
            context_lens=context_lens,
            tokens=state.tokens,
            slots=state.slots,
        )
    # No token is below NO_TOKEN. But lengths that depend on the tokens are written last: XLA would
    # copy the old ones, which others read, if it wrote the new ones before.
    new_lens = context_lens + jnp.minimum(its.of_rows - NO_TOKEN, 0)
    state = dataclasses.replace(state, tokens=its.tokens, slots=its.slots)
    return _set_lengths(state, inputs, new_lens), StepOutputs(
        tokens=its.of_rows,
        logprobs=its.logprobs,
        slices=slices,
        logits=logits if plan.leaves_logits else None,
    )


def _pool(
    pooling: Pooling,
    model: Any,
    inputs: StepInputs,
    context_lens: jax.Array,
    hidden: jax.Array,
    state: DeviceState,
    slices: dict[str, dict[str, jax.Array]],
) -> tuple[DeviceState, StepOutputs]:
    """The end of a step in an engine that pools: from hidden states to vectors. The tokens only say
    whether these are finite."""
    with jax.named_scope("pool"):
        pooled = pool_rows(
            pooling.seq_pooling,
            model,
            hidden,
            token_rows=inputs.token_rows,
            query_starts=inputs.query_starts,
            context_lens=context_lens,
            slots=inputs.slots,
            sums=state.sums,
        )
    is_finite = jnp.isfinite(pooled.vectors).all(axis=1)
    state = dataclasses.replace(state, sums=pooled.sums)
    return _set_lengths(state, inputs, context_lens), StepOutputs(
        tokens=jnp.where(is_finite, 0, NO_TOKEN).astype(jnp.int32),
        logprobs=None,
        slices={**slices, ROWS: {"vectors": pooled.vectors}},
        logits=None,
    )


def _set_lengths(state: DeviceState, inputs: StepInputs, context_lens: jax.Array) -> DeviceState:
    lengths = state.lengths.at[inputs.slots].set(context_lens, mode="drop")
    return dataclasses.replace(state, lengths=lengths)


def _compute_slices(
    layout: InputLayout, inputs: StepInputs, model: Any, hidden: jax.Array
) -> dict[str, dict[str, jax.Array]]:
    """The features' slices of the result."""
    slices = {}
    for feature in layout.features:
        with jax.named_scope(feature.name):
            slices[feature.name] = feature.compute(inputs.slices[feature.name], model, hidden)
    return slices


def update_block_tables(block_tables: jax.Array, updates: jax.Array) -> jax.Array:
    """Apply (row, index, block) changes. A change with a row out of range is padding."""
    return block_tables.at[updates[:, 0], updates[:, 1]].set(updates[:, 2], mode="drop")


def _token_ids(inputs: StepInputs, carried: jax.Array) -> jax.Array:
    slots = inputs.slots[inputs.token_rows]
    last_sampled = carried.at[slots].get(mode="fill", fill_value=0)
    return jnp.where(inputs.token_ids == CARRIED_TOKEN, last_sampled, inputs.token_ids)


def _context_lens(inputs: StepInputs, lengths: jax.Array) -> jax.Array:
    """How many tokens of each row's request are in the caches after this step; 0 for padding."""
    known = lengths.at[inputs.slots].get(mode="fill", fill_value=0)
    starts = jnp.where(inputs.starts == GO_ON, known, inputs.starts)
    return starts + jnp.diff(inputs.query_starts)


def _last_seen(
    plan: EnginePlan, window: Window, inputs: StepInputs, context_lens: jax.Array
) -> jax.Array | None:
    """The position up to which each token sees, in layers where tokens of images see each other;
    None: it sees no later token."""
    ahead = inputs.slices.get(IMAGES, {}).get("ahead")
    if ahead is None or plan.images is None:
        return None
    if window is None and plan.images.spec.only_in_windows:
        return None
    return _positions(inputs, context_lens) + ahead


def _positions(inputs: StepInputs, context_lens: jax.Array) -> jax.Array:
    """Position in its sequence of every token; padding tokens get 0."""
    first = context_lens - jnp.diff(inputs.query_starts)  # of each row
    offsets = jnp.arange(len(inputs.token_ids)) - inputs.query_starts[inputs.token_rows]
    real = jnp.arange(len(inputs.token_ids)) < inputs.query_starts[-1]
    return jnp.where(real, first[inputs.token_rows] + offsets, 0)

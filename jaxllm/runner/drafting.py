"""The seam between a step and what drafts: two calls in each step of an engine that speculates.

`ahead` is called at the begin of a step whose rows have drafts, and may make them: a model or a
head that drafts does it there, since the host has given these rows blocks for their drafts. For
rows that sample late it is called in a program of its own before the step (`runner.ahead`).
`after` is called at the end of every step. It notes what is needed later of the step's texts, and
may propose drafts for the next step. A head reads the model's hidden states there.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxllm.layers.context import StepContext
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.runner.inputs import StepInputs
from jaxllm.runner.state import DeviceState
from jaxllm.sampling import row_params
from jaxllm.sampling.sampler import sample
from jaxllm.scheduler.schedule import NO_TOKEN
from jaxllm.speculation.drafter import NO_DRAFT, Drafter

# As many tokens of a row that a grammar has forced does a drafter note.
_MOST_FORCED = 32
# What a draft is not sampled with.
_NO_LOGPROBS = ~(row_params.LOGPROBS | row_params.MORE_LOGPROBS)


class Forward(NamedTuple):
    """What a step has computed of its tokens before it samples."""

    token_ids: jax.Array  # i32 [T]: with the drafts of rows that have some
    hidden: jax.Array  # [T, D]: after the final norm
    tapped: tuple[jax.Array, ...]  # [T, D]: residual streams before the layers `Drafting.taps`
    context: StepContext


class Ends(NamedTuple):
    """What a step has sampled for its rows. Of a late row nothing is known yet."""

    tokens: jax.Array  # i32 [R, n]; NO_TOKEN if the logits are not finite
    num_accepted: jax.Array  # i32 [R]: drafts; so many of the tokens before the last one count
    lengths: jax.Array  # i32 [R]: the tokens in the caches: all but the newest

    @property
    def newest(self) -> jax.Array:
        """i32 [R]"""
        return jnp.take_along_axis(self.tokens, self.num_accepted[:, None], axis=1)[:, 0]


def rows_with_drafts(plan: EnginePlan, num_drafts: jax.Array) -> jax.Array:
    """The rows of a step with drafts, i32 [most], then R. `num_drafts` are those of its rows."""
    assert plan.speculation is not None
    num_rows = len(num_drafts)
    most = min(num_rows, plan.speculation.max_rows)
    return jnp.nonzero(num_drafts > 0, size=most, fill_value=num_rows)[0]


class AheadRows(NamedTuple):
    """Rows for which drafts are made, among others, which have none."""

    slots: jax.Array  # i32 [R]
    num_drafts: jax.Array  # i32 [R]
    lengths: jax.Array  # i32 [R]: the tokens up to the newest
    newest: jax.Array  # i32 [R]: the token before the drafts
    prompt_lens: jax.Array  # i32 [R]
    row_params: jax.Array  # i32 [R, columns]


class Drafting(Protocol):
    """Makes the drafts of an engine; traced."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers before which it needs the model's residual stream."""
        ...

    def ahead(self, rows: AheadRows, state: DeviceState) -> DeviceState:
        """Draft as many tokens for each row as the step verifies, if that is still to be done. The
        block tables of the state are those of this step."""
        ...

    def after(
        self, inputs: StepInputs, forward: Forward, ends: Ends, state: DeviceState
    ) -> tuple[DeviceState, jax.Array]:
        """Note the end of a step. Return also how many drafts there are for the next one of each
        row, i32 [R]; zeros if `ahead` makes them."""
        ...


class Proposed(NamedTuple):
    """What a drafter has proposed for some rows, and the tables of the state with it."""

    drafts: jax.Array  # i32 [R, k]
    num_proposed: jax.Array  # i32 [R]
    table: jax.Array  # i32 [S, k]
    drafter: Any


@dataclasses.dataclass(frozen=True)
class Proposing:
    """Proposes at the end of a step, by a `Drafter`, which sees tokens only."""

    plan: EnginePlan
    drafter: Drafter
    taps: tuple[int, ...] = ()

    def ahead(self, rows: AheadRows, state: DeviceState) -> DeviceState:
        return state

    def after(
        self, inputs: StepInputs, forward: Forward, ends: Ends, state: DeviceState
    ) -> tuple[DeviceState, jax.Array]:
        assert state.drafts is not None
        tables = state.drafter
        if inputs.num_drafts is not None and self.plan.verifies_late:
            tables = self._with_forced(inputs, forward, ends, tables)
        its = self.propose(inputs.slots, inputs.samples, ends, state.drafts, tables)
        return dataclasses.replace(state, drafts=its.table, drafter=its.drafter), its.num_proposed

    def propose(
        self,
        slots: jax.Array,
        samples: jax.Array,
        ends: Ends,
        table: jax.Array,
        drafter: Any,
    ) -> Proposed:
        """Note what some rows have sampled, and propose for them. `table` and `drafter` are those
        of the state. With more rows than may have drafts nothing is proposed."""
        plan, speculation = self.plan, self.plan.speculation
        assert speculation is not None
        num_rows, k = len(ends.lengths), speculation.num_drafts
        most = min(num_rows, speculation.max_rows)
        kept = jnp.where(samples, slots, plan.max_num_seqs)
        places = ends.lengths + 1
        with jax.named_scope("propose"):
            num_tokens = jnp.where(samples, 1 + ends.num_accepted, 0)
            drafter = self.drafter.record(drafter, ends.tokens, num_tokens, kept, places)
            drafts = jax.lax.cond(
                # Padding rows are the last ones.
                jnp.any(samples) & jnp.all(slots[most:] >= plan.max_num_seqs),
                lambda: self.drafter.propose(drafter, k, kept[:most], places[:most]),
                lambda: jnp.full((most, k), NO_DRAFT, jnp.int32),
            )
        count = jnp.sum((drafts != NO_DRAFT) & samples[:most, None], axis=1, dtype=jnp.int32)
        return Proposed(
            drafts=jnp.pad(drafts, ((0, num_rows - most), (0, 0)), constant_values=NO_DRAFT),
            num_proposed=jnp.pad(count, (0, num_rows - most)),
            table=table.at[kept[:most]].set(drafts, mode="drop"),
            drafter=drafter,
        )

    def _with_forced(self, inputs: StepInputs, forward: Forward, ends: Ends, drafter: Any) -> Any:
        """Let the drafter note the tokens of rows that a grammar has forced. They come from the
        host, and nobody has sampled them. Of many in a row it gets the last ones."""
        assert inputs.num_drafts is not None
        width = min(len(forward.token_ids), _MOST_FORCED)
        num_tokens = jnp.diff(inputs.query_starts)
        forced = jnp.clip(ends.lengths - inputs.prompt_lens, 0, jnp.minimum(num_tokens, width))
        forced = jnp.where((num_tokens > 1) & (inputs.num_drafts == 0), forced, 0)

        def record() -> Any:
            first = inputs.query_starts[1:] - forced
            places = first[:, None] + jnp.arange(width)
            tokens = forward.token_ids.at[places].get(mode="clip")
            return self.drafter.record(drafter, tokens, forced, inputs.slots, ends.lengths)

        return jax.lax.cond(jnp.any(forced > 0), record, lambda: drafter)


class Round(NamedTuple):
    """The rows of a round of drafting; those that are in it are the first."""

    slots: jax.Array  # i32 [R]
    is_in: jax.Array  # bool [R]
    ends: jax.Array  # i32 [R]: how many tokens each row has, drafts included; 0 if it is not in
    newest: jax.Array  # i32 [R]: the last of these


def draft_in_rounds(
    plan: EnginePlan,
    rows: AheadRows,
    state: DeviceState,
    carried: Callable[[jax.Array], Any],
    guess: Callable[[Round, Any], tuple[jax.Array, Any]],
) -> tuple[DeviceState, Any]:
    """Draft token by token, each as its row samples and with the noise of its place.

    `carried(slots)` is what `guess` begins with. In each round it returns the logits of the next
    token of each row, and what it goes on with. All rounds are alike, so a program has what drafts
    once, in a loop that has no round if no row has drafts. The caches of a loop stay where they
    are; those of a conditional would be copied.
    """
    assert plan.speculation is not None
    assert state.drafts is not None and state.slots is not None
    k, num_rows = plan.speculation.num_drafts, min(len(rows.slots), plan.speculation.max_rows)
    # The rows with the most drafts first, so that in each round the rows in it are the first.
    counts, order = jax.lax.top_k(rows.num_drafts, num_rows)
    rows = AheadRows(*(x[order] for x in rows))
    slots = jnp.where(counts > 0, rows.slots, plan.max_num_seqs)
    params = row_params.decode(rows.row_params, plan.logits_processors)
    params = dataclasses.replace(params, flags=params.flags & _NO_LOGPROBS)
    slot_state = state.slots

    def one_round(index: jax.Array, carry: tuple[Any, jax.Array, jax.Array]):
        its, drafts, newest = carry
        is_in = counts > index
        ends = jnp.where(is_in, rows.lengths + index, 0)
        logits, its = guess(Round(slots, is_in, ends, newest), its)
        sampled = sample(
            _fitted(logits, plan.num_logits),
            params,
            slots=slots,
            samples=is_in,
            output_index=ends - rows.prompt_lens,
            positions=ends,
            state=slot_state,
            num_logprobs=0,
            layout=plan.sampling,
            processors=plan.logits_processors,
            vocab_size=plan.architecture.vocab_size,
            pending=jnp.where(jnp.arange(k) < index, drafts, NO_TOKEN),
        )
        return its, drafts.at[:, index].set(sampled.tokens), sampled.tokens

    none = jnp.full((num_rows, k), NO_TOKEN, jnp.int32)
    with jax.named_scope("draft"):
        its, drafts, _ = jax.lax.fori_loop(
            0, counts[0], one_round, (carried(slots), none, rows.newest)
        )
    drafts = state.drafts.at[slots].set(drafts, mode="drop")
    return dataclasses.replace(state, drafts=drafts), its


def _fitted(logits: jax.Array, width: int) -> jax.Array:
    """Logits with as many columns as the model's. Ids above the smaller vocabulary are padding."""
    missing = width - logits.shape[1]
    if missing <= 0:
        return logits[:, :width]
    return jnp.pad(logits, ((0, 0), (0, missing)), constant_values=-jnp.inf)

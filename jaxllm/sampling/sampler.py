"""Chooses the next token of every row: the last part of a step.

One program serves every mix of parameters. Whatever only some requests need is under a conditional
on the step's rows, so it costs nothing if no row needs it, and nothing is compiled after start-up.
A step of greedy rows that want nothing else takes an arg-max, and enters no conditional.

XLA needs seconds to compile all that, in every program. Where the layout has an op, one call of it
does the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxllm_kernels.sampler.api import LogprobOutput, Sampler

from jaxllm.sampling import row_params
from jaxllm.sampling.adjust import adjust_logits
from jaxllm.sampling.choose import MostLikely, draw, most_likely
from jaxllm.sampling.layout import Layout
from jaxllm.sampling.logits_processor import LogitsProcessor
from jaxllm.sampling.logprobs import no_logprobs, token_logprobs
from jaxllm.sampling.row_params import RowParams
from jaxllm.sampling.slot_state import SlotState, record_tokens


class SampleOutput(NamedTuple):
    """The sampler's results for a step's rows."""

    tokens: jax.Array  # i32 [R]; meaningful where the row samples
    # bool [R]: whether the row's largest logit is finite, and no bias, processor or penalty has
    # made a logit NaN.
    is_valid: jax.Array
    state: SlotState
    logprobs: LogprobOutput  # [R, 1 + num_logprobs]; zeros when no row asked


def sample(
    logits: jax.Array,
    params: RowParams,
    *,
    slots: jax.Array,
    samples: jax.Array,
    output_index: jax.Array,
    positions: jax.Array,
    state: SlotState,
    num_logprobs: int,
    layout: Layout,
    processors: Sequence[LogitsProcessor] = (),
    vocab_size: int | None = None,
    masks: jax.Array | None = None,
    pending: jax.Array | None = None,
) -> SampleOutput:
    """Sample one token per row from logits, f32 [R, V]. Columns from `vocab_size` on (default: V)
    are padding, -inf, which users' processors do not get. The order is:

    1. logit bias, allowed token ids, and the tokens of the row's mask
    2. bad words: mask the last token of each whose other tokens are already there
    3. min_tokens: mask the stop ids until the output is long enough
    4. the users' logits processors, in the order of the engine's list
    5. penalties: repetition (prompt and output), frequency, presence (output only)
    6. greedy rows: take the arg-max, and skip 7 to 9
    7. temperature
    8. min_p, top_k, top_p
    9. draw from the tokens that are left
    10. logprobs of the token and of the best tokens, from the model's unchanged logits
    11. count the token in its slot's output

    `slots` i32 [R] is out of range for padding. `samples` bool [R] says which rows sample.
    `output_index` i32 [R] is the number of output tokens before this one. `positions` i32 [R] is
    the token's place in its sequence: with the row's seed it decides the draw, so a request's
    tokens do not depend on its neighbours. `num_logprobs` is the largest number of best tokens that
    a row may want. `layout` says how the platform likes to read logits; it changes no result.
    `masks` u32 [R, at least V / 32] has a bit for each token that a row may get, lowest first;
    without it every row may get any.
    With `pending`, i32 [R, n], a row samples as if these tokens, up to the first NO_TOKEN, were in
    its slot's output. Then several rows may be of one slot, and 11 is left to `record_accepted`.

    If 2 to 5 leave a row no token, it goes on with the logits after 1, so it never gets a token
    that is not allowed. (The input processor refuses parameters that never leave one.) If 1 leaves
    a row none, since no allowed id is in its mask, only the mask counts. Logits that are NaN stay
    NaN: the row is not valid, gets some token, and affects no other row.
    """
    own_flags = params.flags if masks is None else params.flags | row_params.GRAMMAR
    flags = jnp.where(samples, own_flags, 0)
    if layout.op is not None and not processors:
        its = layout.op.sample(
            logits,
            params.packed,
            flags=flags,
            slots=slots,
            output_index=output_index,
            positions=positions,
            tables=state.tables(),
            num_logprobs=num_logprobs,
            masks=masks,
            pending=pending,
        )
        if pending is None:
            state = _record(
                layout.op, state, its.tokens[:, None], jnp.ones_like(slots), slots, flags
            )
        return SampleOutput(its.tokens, its.is_valid, state, its.logprobs)
    best = most_likely(logits, layout)

    def plain() -> tuple[_Chosen, SlotState]:
        # No token is below zero. A GPU makes all that depends on one array in two launches, and
        # would need one for each constant and for the copy of the tokens.
        zero = jnp.minimum(best.tokens, 0)
        unasked = no_logprobs(len(logits), num_logprobs, zero)
        return _Chosen(jnp.maximum(best.tokens, 0), zero < 0, unasked), state

    def choose_some(rows: _Rows) -> _Chosen:
        return _choose(
            rows,
            state=state,
            num_logprobs=num_logprobs,
            layout=layout,
            processors=processors,
            vocab_size=logits.shape[1] if vocab_size is None else vocab_size,
        )

    def choose() -> tuple[_Chosen, SlotState]:
        rows = _Rows(logits, best, flags, params, slots, output_index, positions, masks, pending)
        chosen = _in_parts(choose_some, rows, layout.max_rows)
        if pending is not None:
            return chosen, state
        records = jnp.any((flags & row_params.RECORDS) != 0)
        new_state = jax.lax.cond(
            records, lambda: record_tokens(state, chosen.tokens, slots, flags), lambda: state
        )
        return chosen, new_state

    asks = row_params.RANDOM | row_params.ADJUSTS | row_params.LOGPROBS
    chosen, new_state = jax.lax.cond(jnp.any((flags & asks) != 0), choose, plain)
    is_valid = jnp.isfinite(best.logits) & ~chosen.has_nan
    return SampleOutput(chosen.tokens, is_valid, new_state, chosen.logprobs)


def record_accepted(
    state: SlotState,
    tokens: jax.Array,
    num_tokens: jax.Array,
    slots: jax.Array,
    flags: jax.Array,
    layout: Layout,
) -> SlotState:
    """Count the first `num_tokens`, i32 [R], of each row's tokens, i32 [R, n], in its slot's
    output. `flags` are those of `RowParams`."""
    if layout.op is not None:
        return _record(layout.op, state, tokens, num_tokens, slots, flags)

    def record() -> SlotState:
        recorded = state
        for index in range(tokens.shape[1]):
            its = jnp.where(index < num_tokens, flags, 0)
            recorded = record_tokens(recorded, tokens[:, index], slots, its)
        return recorded

    flags = jnp.where(num_tokens > 0, flags, 0)
    records = (jnp.bitwise_or.reduce(flags) & row_params.RECORDS) != 0
    return jax.lax.cond(records, record, lambda: state)


def _record(
    op: Sampler,
    state: SlotState,
    tokens: jax.Array,
    num_tokens: jax.Array,
    slots: jax.Array,
    flags: jax.Array,
) -> SlotState:
    tables = op.record(state.tables(), tokens, num_tokens, flags=flags, slots=slots)
    return dataclasses.replace(state, **tables._asdict())


class _Rows(NamedTuple):
    """What is known of some rows."""

    logits: jax.Array
    best: MostLikely  # of these logits
    flags: jax.Array  # cleared in rows that sample nothing
    params: RowParams
    slots: jax.Array
    output_index: jax.Array
    positions: jax.Array
    masks: jax.Array | None
    pending: jax.Array | None


class _Chosen(NamedTuple):
    """What was chosen for some rows."""

    tokens: jax.Array
    has_nan: jax.Array  # whether a change has made a logit NaN
    logprobs: LogprobOutput


def _choose(
    rows: _Rows,
    *,
    state: SlotState,
    num_logprobs: int,
    layout: Layout,
    processors: Sequence[LogitsProcessor],
    vocab_size: int,
) -> _Chosen:
    """The conditional parts of `sample`, for some rows."""
    logits, best, flags, params = rows.logits, rows.best, rows.flags, rows.params
    needed = jnp.bitwise_or.reduce(flags)
    random = (flags & row_params.RANDOM) != 0

    def adjust() -> tuple[jax.Array, MostLikely, jax.Array]:
        adjusted = adjust_logits(
            logits,
            params,
            flags=flags,
            slots=rows.slots,
            output_index=rows.output_index,
            state=state,
            layout=layout,
            processors=processors,
            vocab_size=vocab_size,
            masks=rows.masks,
            pending=rows.pending,
        )
        return adjusted, most_likely(adjusted, layout), jnp.any(jnp.isnan(adjusted), axis=1)

    def choose() -> tuple[jax.Array, jax.Array]:
        adjusted, greedy, has_nan = jax.lax.cond(
            (needed & row_params.ADJUSTS) != 0, adjust, lambda: (logits, best, none_has)
        )

        def draw_some() -> jax.Array:
            drawn = draw(
                adjusted,
                params,
                random=random,
                positions=rows.positions,
                largest=greedy.logits,
                layout=layout,
            )
            return jnp.where(random, drawn, greedy.tokens)

        tokens = jax.lax.cond((needed & row_params.RANDOM) != 0, draw_some, lambda: greedy.tokens)
        return tokens, has_nan

    none_has = jnp.zeros(len(logits), bool)
    tokens, has_nan = jax.lax.cond(
        (needed & (row_params.ADJUSTS | row_params.RANDOM)) != 0,
        choose,
        lambda: (best.tokens, none_has),
    )
    logprobs = jax.lax.cond(
        (needed & row_params.LOGPROBS) != 0,
        lambda: token_logprobs(
            logits,
            tokens,
            best,
            k=num_logprobs,
            wants_more=(needed & row_params.MORE_LOGPROBS) != 0,
            layout=layout,
        ),
        lambda: no_logprobs(len(tokens), num_logprobs),
    )
    return _Chosen(tokens, has_nan, logprobs)


def _in_parts(function: Callable[[_Rows], _Chosen], rows: _Rows, max_rows: int) -> _Chosen:
    """Apply the function to at most `max_rows` rows at a time.

    The last part ends with the last row, so it may begin before the one before it ends. A row that
    is computed twice is the same twice.
    """
    num_rows = len(rows.slots)
    if num_rows <= max_rows:
        return function(rows)
    last = num_rows - max_rows

    def one_part(first: jax.Array) -> _Chosen:
        return function(
            jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, max_rows), rows)
        )

    def join(x: jax.Array) -> jax.Array:
        before = x[:-1].reshape(-1, *x.shape[2:])[:last]
        return jnp.concatenate([before, x[-1]])

    firsts = jnp.minimum(jnp.arange(0, num_rows, max_rows, dtype=jnp.int32), last)
    parts: Any = jax.lax.map(one_part, firsts)
    return jax.tree.map(join, parts)

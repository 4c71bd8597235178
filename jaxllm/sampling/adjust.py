"""Changes to the logits before sampling: biases, bans, users' processors, penalties.

Each change is a function of all rows' logits, f32 [R, V]. It runs only if some row of the step uses
it, and changes only those rows.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxllm.errors import ValidationError
from jaxllm.sampling import row_params
from jaxllm.sampling.layout import Layout
from jaxllm.sampling.logits_processor import LogitsProcessor
from jaxllm.sampling.row_params import RowParams
from jaxllm.sampling.slot_state import MAX_COUNT, NO_TOKEN, WORD_BITS, SlotState


def adjust_logits(
    logits: jax.Array,
    params: RowParams,
    *,
    flags: jax.Array,
    slots: jax.Array,
    output_index: jax.Array,
    state: SlotState,
    layout: Layout,
    processors: Sequence[LogitsProcessor],
    vocab_size: int,
    masks: jax.Array | None = None,
    pending: jax.Array | None = None,
) -> jax.Array:
    """Apply all changes that come before temperature, in the sampler's order.

    `flags` i32 [R] are the flags of `params`, cleared in rows that sample nothing. If the changes
    leave a row without a token, it gets the logits with only biases, allowed ids and the row's mask
    applied.

    `pending` i32 [R, n] are tokens that follow those of the slot, then NO_TOKEN.
    """

    def has(flag: int) -> jax.Array:
        return (flags & flag) != 0

    too_early = has(row_params.MIN_TOKENS) & (output_index < params.min_tokens)
    logits = _in_rows(has(row_params.LOGIT_BIAS), _add_bias, logits, state, slots)
    biased = _in_rows(has(row_params.ALLOWED_IDS), _mask_others, logits, state, slots)
    if masks is not None:
        in_form = has(row_params.GRAMMAR)
        biased = _in_rows(in_form, _keep_form, biased, masks)
        both = in_form & has(row_params.ALLOWED_IDS)
        biased = _in_rows(both, _or_form_alone, biased, logits, masks)
    logits = _in_rows(has(row_params.BAD_WORDS), _ban_words, biased, state, slots, pending)
    logits = _in_rows(too_early, _hold_back_stop_ids, logits, state, slots)
    for index, processor in enumerate(processors):
        uses = has(row_params.processor_flag(index))
        values = params.processor_params[index]
        apply = functools.partial(_apply, processor, vocab_size)
        logits = _in_rows(uses, apply, logits, values, output_index)
        if masks is not None:  # a user's processor may give a token back that has no bit
            logits = jnp.where(
                has(row_params.GRAMMAR)[:, None] & (biased == -jnp.inf), -jnp.inf, logits
            )
    penalized = has(row_params.PENALTIES)
    logits = _in_rows(penalized, _penalize, logits, state, slots, params, layout, pending)
    # NaN counts as a token that is left, so that a row of NaN is not replaced by a valid one.
    some_left = jnp.any(logits != -jnp.inf, axis=1, keepdims=True)
    return jnp.where(some_left, logits, biased)


def _in_rows(
    rows: jax.Array, change: Callable[..., jax.Array], logits: jax.Array, *args: object
) -> jax.Array:
    """Apply `change(logits, *args)` to the given rows, bool [R]; skip it if there are none."""
    return jax.lax.cond(
        jnp.any(rows),
        lambda: jnp.where(rows[:, None], change(logits, *args), logits),
        lambda: logits,
    )


def _of_rows(table: jax.Array, slots: jax.Array) -> jax.Array:
    # Padding rows get the entries of the last slot, and do not use them.
    return table.at[slots].get(mode="clip")


def _add_bias(logits: jax.Array, state: SlotState, slots: jax.Array) -> jax.Array:
    rows = jnp.arange(len(logits))[:, None]
    token_ids = _of_rows(state.biased_ids, slots)
    # A request has one bias for a token. Said so, a TPU sorts nothing; places without a token are
    # out of range each by itself.
    beyond = logits.shape[1] + jnp.arange(token_ids.shape[1])
    token_ids = jnp.where(token_ids == NO_TOKEN, beyond, token_ids)
    biases = _of_rows(state.biases, slots)
    return logits.at[rows, token_ids].add(biases, mode="drop", unique_indices=True)


def _mask_others(logits: jax.Array, state: SlotState, slots: jax.Array) -> jax.Array:
    """Set all tokens but the allowed ones to -inf."""
    allowed = _bits(_of_rows(state.allowed_bits, slots), logits.shape[1])
    return jnp.where(allowed, logits, -jnp.inf)


def _keep_form(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Set all tokens but those of a row's mask to -inf."""
    return jnp.where(_bits(masks, logits.shape[1]), logits, -jnp.inf)


def _or_form_alone(logits: jax.Array, before: jax.Array, masks: jax.Array) -> jax.Array:
    """Give a row that has no token left, since no allowed one is in its mask, all tokens of its
    mask."""
    some_left = jnp.any(logits != -jnp.inf, axis=1, keepdims=True)
    return jnp.where(some_left, logits, _keep_form(before, masks))


def _bits(words: jax.Array, num_bits: int) -> jax.Array:
    """The first bits of each row of words, u32 [R, words], lowest first: bool [R, num_bits]."""
    bits = (words[:, :, None] >> jnp.arange(WORD_BITS, dtype=words.dtype)) & 1
    return bits.reshape(len(words), -1)[:, :num_bits] != 0


def _ban_words(
    logits: jax.Array, state: SlotState, slots: jax.Array, pending: jax.Array | None
) -> jax.Array:
    """Mask the last token of each bad word whose other tokens are the latest output tokens."""
    words = _of_rows(state.bad_words, slots)
    recent = _recent(_of_rows(state.recent_tokens, slots), pending)[:, None, :]
    before = words[:, :, :-1]
    matches = jnp.all((before == NO_TOKEN) | (before == recent), axis=2)
    return _mask_tokens(logits, jnp.where(matches, words[:, :, -1], NO_TOKEN))


def _recent(recent: jax.Array, pending: jax.Array | None) -> jax.Array:
    """The latest tokens of rows, i32 [R, n], after those that are pending."""
    if pending is None:
        return recent
    width = recent.shape[1]
    num_pending = jnp.sum(pending != NO_TOKEN, axis=1, keepdims=True)
    places = num_pending + jnp.arange(width)
    return jnp.take_along_axis(jnp.concatenate([recent, pending], axis=1), places, axis=1)


def _hold_back_stop_ids(logits: jax.Array, state: SlotState, slots: jax.Array) -> jax.Array:
    return _mask_tokens(logits, _of_rows(state.stop_ids, slots))


def _mask_tokens(logits: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Set the given tokens of each row, i32 [R, n], to -inf; skip NO_TOKEN."""
    rows = jnp.arange(len(logits))[:, None]
    return logits.at[rows, _skipped(token_ids, logits)].set(-jnp.inf, mode="drop")


def _skipped(token_ids: jax.Array, logits: jax.Array) -> jax.Array:
    """Map NO_TOKEN out of range. As -1 it would index the last token."""
    return jnp.where(token_ids == NO_TOKEN, logits.shape[1], token_ids)


def _apply(
    processor: LogitsProcessor,
    vocab_size: int,
    padded: jax.Array,
    values: jax.Array,
    output_index: jax.Array,
) -> jax.Array:
    """Apply a user's processor. Refuse another shape, because it would be broadcast silently."""
    logits, padding = padded[:, :vocab_size], padded[:, vocab_size:]
    changed = processor.apply(logits, values, output_index)
    made = f"a {type(changed).__name__}"
    if isinstance(changed, jax.Array):
        if (changed.shape, changed.dtype) == (logits.shape, logits.dtype):
            return jnp.concatenate([changed, padding], axis=1) if padding.size else changed
        made = f"{changed.dtype}{list(changed.shape)}"
    raise ValidationError(
        f"{type(processor).__name__}.apply must return logits as it got them, {logits.dtype}"
        f"{list(logits.shape)}, and returned {made}",
        parameter="logits_processors",
    )


def _penalize(
    logits: jax.Array,
    state: SlotState,
    slots: jax.Array,
    params: RowParams,
    layout: Layout,
    pending: jax.Array | None,
) -> jax.Array:
    counts = layout.entries(state.token_counts, slots).astype(jnp.int32)
    num_output = _add_rounds(counts & MAX_COUNT, state, slots)
    if pending is not None:
        rows = jnp.arange(len(logits))[:, None]
        num_output = num_output.at[rows, _skipped(pending, logits)].add(1, mode="drop")
    repetition = params.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where((counts < 0) | (num_output > 0), repeated, logits)
    logits -= params.frequency[:, None] * num_output
    return logits - params.presence[:, None] * (num_output > 0)


def _add_rounds(num_output: jax.Array, state: SlotState, slots: jax.Array) -> jax.Array:
    """Add the full rounds to the counts [R, V] of a slot's table."""
    if state.full_rounds is None:
        return num_output
    rounds = _skipped(_of_rows(state.full_rounds, slots), num_output)
    rows = jnp.arange(len(num_output))[:, None]
    return num_output.at[rows, rounds].add(MAX_COUNT + 1, mode="drop")

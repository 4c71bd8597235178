"""Changes to the logits before a token is chosen: biases, bans, users' processors, penalties.

Each takes f32 [R, V] logits and leaves the rows without its flag as they are. Each is behind a
conditional, so a step pays only for what its rows use.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxllm.sampling import row_params
from jaxllm.sampling.logits_processor import LogitsProcessor
from jaxllm.sampling.row_params import RowParams
from jaxllm.sampling.slot_state import NO_TOKEN, PROMPT_BIT, SlotState


def adjust_logits(
    logits: jax.Array,
    params: RowParams,
    *,
    flags: jax.Array,
    slots: jax.Array,
    output_index: jax.Array,
    state: SlotState,
    processors: Sequence[LogitsProcessor],
) -> jax.Array:
    """Apply everything that comes before temperature, in the sampler's order.

    `flags`, i32 [R], are those of `params`, cleared where nothing is to be applied.
    """

    def bias(x: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.where(rows[:, None], x + _gather(state.logit_bias, slots), x)

    def ban_words(x: jax.Array, rows: jax.Array) -> jax.Array:
        return _ban_words(
            x, rows, _gather(state.bad_words, slots), _gather(state.recent_tokens, slots)
        )

    def hold_back_stop_ids(x: jax.Array, rows: jax.Array) -> jax.Array:
        return _mask_tokens(x, rows[:, None], _gather(state.stop_ids, slots))

    def penalize(x: jax.Array, rows: jax.Array) -> jax.Array:
        return _penalize(x, rows, _gather(state.token_counts, slots), params)

    def has(flag: int) -> jax.Array:
        return (flags & flag) != 0

    too_early = has(row_params.MIN_TOKENS) & (output_index < params.min_tokens)
    logits = _if_any(has(row_params.LOGIT_BIAS), bias, logits)
    logits = _if_any(has(row_params.BAD_WORDS), ban_words, logits)
    logits = _if_any(too_early, hold_back_stop_ids, logits)
    for index, processor in enumerate(processors):
        values = params.processor_params[index]

        def process(
            x: jax.Array,
            rows: jax.Array,
            processor: LogitsProcessor = processor,
            values: jax.Array = values,
        ) -> jax.Array:
            return jnp.where(rows[:, None], processor.apply(x, values, output_index), x)

        logits = _if_any(has(row_params.processor_flag(index)), process, logits)
    return _if_any(has(row_params.PENALTIES), penalize, logits)


def _if_any(rows: jax.Array, function, logits: jax.Array) -> jax.Array:
    return jax.lax.cond(jnp.any(rows), function, lambda x, _: x, logits, rows)


def _gather(table: jax.Array, slots: jax.Array) -> jax.Array:
    # Padding rows read some slot, and ignore it.
    return table.at[slots].get(mode="clip")


def _mask_tokens(logits: jax.Array, where: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Set to -inf the tokens of each row, i32 [R, n], where told and not NO_TOKEN."""
    rows, vocab_size = logits.shape
    dropped = jnp.where(where & (token_ids != NO_TOKEN), token_ids, vocab_size)
    return logits.at[jnp.arange(rows)[:, None], dropped].set(-jnp.inf, mode="drop")


def _ban_words(
    logits: jax.Array, rows: jax.Array, words: jax.Array, recent: jax.Array
) -> jax.Array:
    """Mask the last token of each word, i32 [R, W, n], whose other tokens were just sampled."""
    before = words[:, :, :-1]
    matches = jnp.all((before == NO_TOKEN) | (before == recent[:, None, :]), axis=2)
    return _mask_tokens(logits, rows[:, None] & matches, words[:, :, -1])


def _penalize(
    logits: jax.Array, rows: jax.Array, counts: jax.Array, params: RowParams
) -> jax.Array:
    seen = rows[:, None] & (counts != 0)
    repetition = params.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, repeated, logits)
    num_output = jnp.where(rows[:, None], counts & (PROMPT_BIT - 1), 0)
    return (
        logits
        - params.frequency[:, None] * num_output
        - params.presence[:, None] * (num_output > 0)
    )

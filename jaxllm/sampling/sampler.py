"""Chooses the next token of every row: the last part of a step.

One program serves every mix of parameters. Whatever only some requests need is under a conditional
on the step's rows, so it costs nothing if no row needs it, and nothing is compiled after start-up.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.sampling import row_params
from jaxllm.sampling.adjust import adjust_logits
from jaxllm.sampling.choose import MostLikely, draw, most_likely
from jaxllm.sampling.logits_processor import LogitsProcessor
from jaxllm.sampling.logprobs import LogprobOutput, no_logprobs, token_logprobs
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
    processors: Sequence[LogitsProcessor] = (),
    vocab_size: int | None = None,
) -> SampleOutput:
    """Sample one token per row from logits, f32 [R, V]. Columns from `vocab_size` on (default: V)
    are padding, -inf, which users' processors do not get. The order is:

    1. allowed token ids and logit bias
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
    a row may want.

    If 2 to 5 leave a row no token, it goes on with the logits after 1, so it never gets a token
    that is not allowed. (The input processor refuses parameters that never leave one.) Logits that
    are NaN stay NaN: the row is not valid, gets some token, and affects no other row.
    """
    flags = jnp.where(samples, params.flags, 0)
    needed = jnp.bitwise_or.reduce(flags)
    random = (flags & row_params.RANDOM) != 0

    best = most_likely(logits)

    def adjust() -> tuple[jax.Array, MostLikely, jax.Array]:
        adjusted = adjust_logits(
            logits,
            params,
            flags=flags,
            slots=slots,
            output_index=output_index,
            state=state,
            processors=processors,
            vocab_size=logits.shape[1] if vocab_size is None else vocab_size,
        )
        return adjusted, most_likely(adjusted), jnp.any(jnp.isnan(adjusted), axis=1)

    def choose() -> tuple[jax.Array, jax.Array]:
        adjusted, greedy, has_nan = jax.lax.cond(
            (needed & row_params.ADJUSTS) != 0, adjust, lambda: (logits, best, none_has)
        )
        tokens = jax.lax.cond(
            (needed & row_params.RANDOM) != 0,
            lambda: jnp.where(
                random, draw(adjusted, params, random=random, positions=positions), greedy.tokens
            ),
            lambda: greedy.tokens,
        )
        return tokens, has_nan

    none_has = jnp.zeros(len(logits), bool)
    tokens, has_nan = jax.lax.cond(
        (needed & (row_params.ADJUSTS | row_params.RANDOM)) != 0,
        choose,
        lambda: (best.tokens, none_has),
    )
    is_valid = jnp.isfinite(best.logits) & ~has_nan
    logprobs = jax.lax.cond(
        (needed & row_params.LOGPROBS) != 0,
        lambda: token_logprobs(
            logits,
            tokens,
            best,
            k=num_logprobs,
            wants_more=(needed & row_params.MORE_LOGPROBS) != 0,
        ),
        lambda: no_logprobs(len(tokens), num_logprobs),
    )
    new_state = record_tokens(state, tokens, slots, flags)
    return SampleOutput(tokens, is_valid, new_state, logprobs)

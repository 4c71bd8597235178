"""Chooses the next token of every row: the last part of a step.

One program serves every mix of parameters. What only some requests ask for stands behind a
conditional on the step's rows, so it costs nothing when no row needs it and there is nothing to
compile after start-up.
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
    """What the sampler makes of a step's rows."""

    tokens: jax.Array  # i32 [R]; meaningful where the row samples
    # bool [R]: whether there was something to choose from. The largest of a model's logits is a
    # finite number; and what biases, processors and penalties make of them is one.
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
    """Sample one token per row from logits, f32 [R, V]; columns from `vocab_size` on (default: V)
    are padding, -inf, which users' processors do not get to see:

    1. allowed token ids and logit bias
    2. bad words: mask the last token of each that is otherwise complete
    3. min_tokens: mask the stop ids until the output is long enough
    4. the users' logits processors, in the order of the engine's list
    5. penalties: repetition (prompt and output), frequency, presence (output only)
    6. greedy rows: the arg-max, and they are done
    7. temperature
    8. min_p, top_k, top_p
    9. draw from what is left
    10. logprobs of the token, and the best ones, under the logits as they came
    11. count the token among its slot's output

    `slots` i32 [R] is out of range for padding; `samples` bool [R] says whose token counts;
    `output_index` i32 [R] is the number of output tokens before this one; `positions` i32 [R] is
    the token's place in its sequence: with the row's seed it decides the draw, so a request's
    tokens do not depend on its neighbours; `num_logprobs` is how many of the best ones a row may
    ask for. A row in which 2 to 5 leave no token (the door refuses
    what always would) goes on with its logits as 1 left them, so that it never gets a token that
    is not allowed. Logits that are NaN stay so, and the row is not valid; it gets some token, and
    touches no other.
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

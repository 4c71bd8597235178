"""The contract of the sampler as one op, and the columns and flags of its rows.

`jaxllm.sampling.sampler.sample` says what is computed, and in which order. Its code for XLA is the
reference. An implementation chooses the same tokens: it evaluates the same random bits, and its
numbers differ in their last digits at most. What it computes for a row does not depend on the other
rows, nor on how many there are.
"""

from typing import NamedTuple, Protocol

import jax

# Flags: the parts of the sampler that a row needs. Native code has them, too.
RANDOM = 1 << 0  # temperature above zero
LOGIT_BIAS = 1 << 1
BAD_WORDS = 1 << 2
MIN_TOKENS = 1 << 3
PENALTIES = 1 << 4
LOGPROBS = 1 << 5
MORE_LOGPROBS = 1 << 6  # more than the best token's, of those that a step computes
ALLOWED_IDS = 1 << 7
GRAMMAR = 1 << 8  # the sampler itself sets it, in rows that have a mask

# The first columns of a row's parameters, int32 or the bits of float32. Native code has them, too.
FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
INTS = ("top_k", "seed_low", "seed_high", "min_tokens", "flags")


class SlotTables(NamedTuple):
    """The tables of the requests' slots; S slots, V vocabulary. `jaxllm.sampling.slot_state` says
    what is in them."""

    token_counts: jax.Array  # i16 [S, V]
    full_rounds: jax.Array | None  # i32 [S, any]
    allowed_bits: jax.Array  # u32 [S, at least V / 32]
    biased_ids: jax.Array  # i32 [S, any]
    biases: jax.Array  # f32 [S, as many]
    bad_words: jax.Array  # i32 [S, words, tokens]
    recent_tokens: jax.Array  # i32 [S, tokens - 1]
    stop_ids: jax.Array  # i32 [S, any]


class LogprobOutput(NamedTuple):
    """Logprobs at n positions. Column 0 is the sampled or prompt token; the k most likely tokens
    follow, best first. Positions without a request for logprobs have zeros."""

    token_ids: jax.Array  # i32 [n, 1 + k]
    logprobs: jax.Array  # f32 [n, 1 + k]
    ranks: jax.Array  # i32 [n]: 1 + the number of tokens more likely than the one in column 0
    normalisers: jax.Array  # f32 [n]: logit minus logprob


class Sampled(NamedTuple):
    """What was chosen for the rows."""

    tokens: jax.Array  # i32 [R]
    is_valid: jax.Array  # bool [R]: the logits, and what was made of them, are numbers
    logprobs: LogprobOutput


class Sampler(Protocol):
    """Implementations are frozen dataclasses, as those of `dense.api.Matmul`."""

    def sample(
        self,
        logits: jax.Array,
        params: jax.Array,
        *,
        flags: jax.Array,
        slots: jax.Array,
        output_index: jax.Array,
        positions: jax.Array,
        tables: SlotTables,
        num_logprobs: int,
        masks: jax.Array | None,
        pending: jax.Array | None,
    ) -> Sampled:
        """Choose a token for each row of logits, f32 [R, V].

        `params` i32 [R, at least the columns above] are the rows' parameters. Its column of flags
        is not read: `flags` i32 [R] are those that count, cleared in rows that do not sample, which
        get their most likely token. Rows without LOGPROBS have zeros for them, and so have columns
        that a row does not want. The tables are read for rows with a flag that says so, and only
        then must the row's slot exist."""
        ...

    def logprobs(
        self, logits: jax.Array, targets: jax.Array, *, num_logprobs: int, wants_more: jax.Array
    ) -> LogprobOutput:
        """Compute logprobs of the targets, i32 [R], under logits f32 [R, V], and of the most likely
        token; of `num_logprobs` of them if `wants_more`, bool [], is set."""
        ...

    def record(
        self,
        tables: SlotTables,
        tokens: jax.Array,
        num_tokens: jax.Array,
        *,
        flags: jax.Array,
        slots: jax.Array,
    ) -> SlotTables:
        """Count the first `num_tokens`, i32 [R], of each row's tokens, i32 [R, n], in the tables
        that the row's flags select. Rows whose slot does not exist count nothing."""
        ...

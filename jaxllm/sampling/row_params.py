"""Sampling parameters for the device: a few int32 columns per row of a step.

`encode` runs once on the host, when a request takes a slot. The runner copies the columns into the
packed buffer of every step, with floats as their bits. `decode` reads them in the traced step. A
row of zeros is padding: it is greedy and has no flags, so it switches nothing on.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.sampler.api import (
    ALLOWED_IDS,
    BAD_WORDS,
    FLOATS,
    GRAMMAR,
    INTS,
    LOGIT_BIAS,
    LOGPROBS,
    MIN_TOKENS,
    MORE_LOGPROBS,
    PENALTIES,
    RANDOM,
)

from jaxllm.sampling.logits_processor import (
    MAX_LOGITS_PROCESSORS,
    LogitsProcessor,
    encode_request,
)
from jaxllm.sampling_params import MAX_STEP_LOGPROBS, SamplingParams

# The flags of users' processors follow the sampler's own.
_FIRST_PROCESSOR = 1 << 16
_PROCESSORS = ((1 << MAX_LOGITS_PROCESSORS) - 1) * _FIRST_PROCESSOR

# Unions: the flags that read the slot's state, those that write the sampled token to it, and all
# flags that change the logits.
USES_SLOT = LOGIT_BIAS | ALLOWED_IDS | BAD_WORDS | MIN_TOKENS | PENALTIES
RECORDS = PENALTIES | BAD_WORDS
ADJUSTS = USES_SLOT | GRAMMAR | _PROCESSORS

_COLUMN = {name: column for column, name in enumerate((*FLOATS, *INTS))}

_FLOAT = np.finfo(np.float32)

# The number of the sampler's own columns. The columns of the logits processors follow.
NUM_PARAMS = len(_COLUMN)


def processor_flag(index: int) -> int:
    """The flag of rows that use the logits processor at this index of the engine's list."""
    assert 0 <= index < MAX_LOGITS_PROCESSORS, index
    return _FIRST_PROCESSOR << index


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """The sampling parameters of a step's rows."""

    temperature: jax.Array  # f32 [R]; 0 is greedy
    top_k: jax.Array  # i32 [R]; 0 is off
    top_p: jax.Array  # f32 [R]; 1 is off
    min_p: jax.Array  # f32 [R]; 0 is off
    presence: jax.Array  # f32 [R]
    frequency: jax.Array  # f32 [R]
    repetition: jax.Array  # f32 [R]; 1 is off
    seed_high: jax.Array  # u32 [R]
    seed_low: jax.Array  # u32 [R]
    min_tokens: jax.Array  # i32 [R]
    flags: jax.Array  # i32 [R]
    processor_params: tuple[jax.Array, ...]  # f32 [R, num_params] of each logits processor
    packed: jax.Array  # i32 [R, columns]: all of these, as they came

    @property
    def seed(self) -> jax.Array:
        """Both halves, u32 [R, 2]. Whoever needs it puts it together: a GPU has a launch for it."""
        return jnp.stack([self.seed_high, self.seed_low], axis=1)


def num_columns(processors: Sequence[LogitsProcessor] = ()) -> int:
    """The number of columns per row, with those of the engine's logits processors."""
    return NUM_PARAMS + sum(processor.num_params for processor in processors)


def request_flags(params: SamplingParams) -> int:
    """The flags of a request, without those of logits processors."""
    return (
        RANDOM * (not params.is_greedy)
        | LOGIT_BIAS * bool(params.logit_bias)
        | ALLOWED_IDS * (params.allowed_token_ids is not None)
        | BAD_WORDS * bool(params.bad_words)
        | MIN_TOKENS * (params.min_tokens > 0)
        | PENALTIES
        * (
            params.presence_penalty != 0
            or params.frequency_penalty != 0
            or params.repetition_penalty != 1
        )
        | LOGPROBS * (params.logprobs is not None)
        | MORE_LOGPROBS * (1 < (params.logprobs or 0) <= MAX_STEP_LOGPROBS)
    )


def encode(
    params: SamplingParams, seed: int, processors: Sequence[LogitsProcessor] = ()
) -> np.ndarray:
    """Encode the columns of one request, i32 [num_columns(processors)]."""
    row = np.zeros(num_columns(processors), np.int32)
    floats, words = row.view(np.float32), row.view(np.uint32)
    if not params.is_greedy:
        floats[_COLUMN["temperature"]] = params.temperature
        row[_COLUMN["top_k"]] = max(params.top_k, 0)
        floats[_COLUMN["top_p"]] = max(params.top_p, _FLOAT.tiny)
        floats[_COLUMN["min_p"]] = params.min_p
    floats[_COLUMN["presence"]] = params.presence_penalty
    floats[_COLUMN["frequency"]] = params.frequency_penalty
    floats[_COLUMN["repetition"]] = np.clip(params.repetition_penalty, _FLOAT.tiny, _FLOAT.max)
    words[_COLUMN["seed_low"]] = seed & 0xFFFFFFFF
    words[_COLUMN["seed_high"]] = seed >> 32
    row[_COLUMN["min_tokens"]] = params.min_tokens
    flags = request_flags(params)
    column = NUM_PARAMS
    for index, values in enumerate(encode_request(processors, params)):
        end = column + processors[index].num_params
        if values is not None:
            floats[column:end] = values
            flags |= processor_flag(index)
        column = end
    row[_COLUMN["flags"]] = flags
    return row


def decode(packed: jax.Array, processors: Sequence[LogitsProcessor] = ()) -> RowParams:
    """Decode the columns of a step's rows, i32 [R, num_columns(processors)]; traced."""
    floats = jax.lax.bitcast_convert_type(packed, jnp.float32)
    words = jax.lax.bitcast_convert_type(packed, jnp.uint32)
    top_p = floats[:, _COLUMN["top_p"]]
    repetition = floats[:, _COLUMN["repetition"]]
    processor_params = []
    column = NUM_PARAMS
    for processor in processors:
        processor_params.append(floats[:, column : column + processor.num_params])
        column += processor.num_params
    return RowParams(
        temperature=floats[:, _COLUMN["temperature"]],
        top_k=packed[:, _COLUMN["top_k"]],
        # Padding and greedy rows have zero, which is not a valid value; 1 has no effect.
        top_p=jnp.where(top_p > 0, top_p, 1),
        min_p=floats[:, _COLUMN["min_p"]],
        presence=floats[:, _COLUMN["presence"]],
        frequency=floats[:, _COLUMN["frequency"]],
        repetition=jnp.where(repetition > 0, repetition, 1),
        seed_high=words[:, _COLUMN["seed_high"]],
        seed_low=words[:, _COLUMN["seed_low"]],
        min_tokens=packed[:, _COLUMN["min_tokens"]],
        flags=packed[:, _COLUMN["flags"]],
        processor_params=tuple(processor_params),
        packed=packed,
    )

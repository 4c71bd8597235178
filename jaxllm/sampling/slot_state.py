"""The sampler's state on the device for the request in each slot.

Only requests that use penalties, a logit bias, allowed ids, bad words or min_tokens have an entry.
The runner writes it when it admits the request (`slot_row`, then `write_slot` on the device), and
every step that samples a token updates it. The flags of a row say which tables its request uses;
the other tables may hold values of an earlier request and are never read.

The runner owns a SlotState and donates it to each program. The program returns the next one.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxllm_kernels.common import cdiv
from jaxllm_kernels.sampler.api import SlotTables

from jaxllm.sampling import row_params
from jaxllm.sampling_params import Limits, SamplingParams

# A count has 15 bits; the sign bit means that the token is in the prompt. A count that overflows
# restarts from zero, and the token is appended to the slot's full rounds.
PROMPT_BIT = np.int16(-(1 << 15))
MAX_COUNT = (1 << 15) - 1
WORD_BITS = 32  # of allowed_bits
NO_TOKEN = -1
_MAX_BIAS = 1e30
# Output tokens that may precede the last token of a bad word.
_MAX_RECENT = Limits.MAX_BAD_WORD_TOKENS - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """Tables with one entry per slot; S slots, V vocabulary."""

    # The count of each token in the output, at most MAX_COUNT, and PROMPT_BIT if the token is in
    # the prompt.
    token_counts: jax.Array  # i16 [S, V]
    # One token for each MAX_COUNT + 1 occurrences that its count lacks, then NO_TOKEN. The width is
    # enough for the longest output. None if the longest output fits in the counts.
    full_rounds: jax.Array | None  # i32 [S, max_model_len / (MAX_COUNT + 1)]
    # A bit for each token, lowest first, set if the token is allowed.
    allowed_bits: jax.Array  # u32 [S, V / WORD_BITS]
    # Tokens, then NO_TOKEN, and the biases that are added to their logits.
    biased_ids: jax.Array  # i32 [S, MAX_LOGIT_BIAS]
    biases: jax.Array  # f32 [S, MAX_LOGIT_BIAS]
    # Token sequences, right-aligned, with NO_TOKEN before them and in unused entries.
    bad_words: jax.Array  # i32 [S, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]
    # The latest output tokens, right-aligned, with NO_TOKEN before the first.
    recent_tokens: jax.Array  # i32 [S, MAX_BAD_WORD_TOKENS - 1]
    # Tokens that min_tokens suppresses, then NO_TOKEN.
    stop_ids: jax.Array  # i32 [S, MAX_STOP_TOKEN_IDS]

    # Logical axes of the tables that are sharded like the logits.
    AXES: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "token_counts": (None, "vocab"),
        "allowed_bits": (None, "vocab"),
    }

    def tables(self) -> SlotTables:
        """The tables, for an op."""
        return SlotTables(*(getattr(self, name) for name in SlotTables._fields))

    @classmethod
    def abstract(cls, num_slots: int, vocab_size: int, max_model_len: int) -> "SlotState":
        """Shapes, for compiling and planning."""
        tables: dict[str, Any] = {
            name: jax.ShapeDtypeStruct((num_slots, *shape), dtype)
            for name, (shape, dtype) in _tables(vocab_size, max_model_len).items()
        }
        return cls(**{"full_rounds": None, **tables})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRow:
    """The entry of one slot, made on the host; fields as in SlotState."""

    token_counts: np.ndarray  # i16 [V]
    full_rounds: np.ndarray | None  # i32 [max_model_len / (MAX_COUNT + 1)]
    allowed_bits: np.ndarray  # u32 [V / WORD_BITS]
    biased_ids: np.ndarray  # i32 [MAX_LOGIT_BIAS]
    biases: np.ndarray  # f32 [MAX_LOGIT_BIAS]
    bad_words: np.ndarray  # i32 [MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]
    recent_tokens: np.ndarray  # i32 [MAX_BAD_WORD_TOKENS - 1]
    stop_ids: np.ndarray  # i32 [MAX_STOP_TOKEN_IDS]

    @classmethod
    def abstract(cls, vocab_size: int, max_model_len: int) -> "SlotRow":
        """Shapes, for compiling."""
        entries: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(*table)
            for name, table in _tables(vocab_size, max_model_len).items()
        }
        return cls(**{"full_rounds": None, **entries})

    @classmethod
    def empty(cls, vocab_size: int, max_model_len: int) -> "SlotRow":
        """The entry of a request that uses no table."""
        entries: dict[str, Any] = {
            name: np.full(shape, NO_TOKEN if dtype is np.int32 else 0, dtype)
            for name, (shape, dtype) in _tables(vocab_size, max_model_len).items()
        }
        return cls(**{"full_rounds": None, **entries})


class AdmittedRequest(Protocol):
    """The attributes of the scheduler's Admission that are needed here."""

    @property
    def sampling_params(self) -> SamplingParams: ...
    @property
    def stop_token_ids(self) -> list[int]: ...
    @property
    def bad_word_ids(self) -> list[list[int]]: ...
    @property
    def prompt_token_ids(self) -> list[int]: ...
    @property
    def output_token_ids(self) -> list[int]: ...


def slot_row(request: AdmittedRequest, vocab_size: int, max_model_len: int) -> SlotRow | None:
    """Make the slot entry of an admitted request; None if it uses none of the tables.

    The entry of a request that was preempted counts its output so far.
    """
    params = request.sampling_params
    flags = row_params.request_flags(params)
    if not flags & row_params.USES_SLOT:
        return None
    row = SlotRow.empty(vocab_size, max_model_len)
    if flags & row_params.PENALTIES:
        counts = np.bincount(_ids(request.output_token_ids), minlength=vocab_size)
        row.token_counts[:] = counts & MAX_COUNT
        prompt = _ids(request.prompt_token_ids)
        row.token_counts[prompt[prompt != NO_TOKEN]] |= PROMPT_BIT
        if row.full_rounds is not None:
            rounds = np.repeat(np.arange(vocab_size), counts // (MAX_COUNT + 1))
            row.full_rounds[: len(rounds)] = rounds
    if flags & row_params.LOGIT_BIAS:
        bias = params.logit_bias or {}
        row.biased_ids[: len(bias)] = _ids(bias)
        # Clip, so that the addition cannot overflow: only tokens that are not allowed have a logit
        # of -inf.
        values = np.array([float(value) for value in bias.values()])
        row.biases[: len(bias)] = np.clip(values, -_MAX_BIAS, _MAX_BIAS)
    if flags & row_params.ALLOWED_IDS:
        allowed = np.zeros(len(row.allowed_bits) * WORD_BITS, bool)
        allowed[_ids(params.allowed_token_ids or ())] = True
        row.allowed_bits[:] = np.packbits(allowed, bitorder="little").view("<u4")
    if flags & row_params.BAD_WORDS:
        for entry, word in zip(row.bad_words, request.bad_word_ids, strict=False):
            assert 0 < len(word) <= Limits.MAX_BAD_WORD_TOKENS, word
            entry[-len(word) :] = word
        recent = request.output_token_ids[-_MAX_RECENT:]
        row.recent_tokens[_MAX_RECENT - len(recent) :] = recent
    if flags & row_params.MIN_TOKENS:
        row.stop_ids[: len(request.stop_token_ids)] = request.stop_token_ids
    return row


def write_slot(state: SlotState, slot: jax.Array, row: SlotRow) -> SlotState:
    """Replace the entry of one slot. Traced; the state is donated."""
    changed = {
        field.name: jax.lax.dynamic_update_index_in_dim(
            table, getattr(row, field.name), slot, axis=0
        )
        for field in dataclasses.fields(SlotState)
        if (table := getattr(state, field.name)) is not None
    }
    return dataclasses.replace(state, **changed)


def record_tokens(
    state: SlotState, tokens: jax.Array, slots: jax.Array, flags: jax.Array
) -> SlotState:
    """Add each row's new token to the tables of its slot that the row's flags select."""
    num_slots = len(state.recent_tokens)
    counted = jnp.where((flags & row_params.PENALTIES) != 0, slots, num_slots)
    token_counts, full_rounds = _count(state, tokens, counted)
    watched = jnp.where((flags & row_params.BAD_WORDS) != 0, slots, num_slots)
    recent = state.recent_tokens.at[slots].get(mode="clip")
    return dataclasses.replace(
        state,
        token_counts=token_counts,
        full_rounds=full_rounds,
        recent_tokens=state.recent_tokens.at[watched].set(
            jnp.concatenate([recent[:, 1:], tokens[:, None]], axis=1), mode="drop"
        ),
    )


def _count(
    state: SlotState, tokens: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Count one more token in each of these slots."""
    rounds = state.full_rounds
    one = jnp.ones(len(tokens), state.token_counts.dtype)
    if rounds is None:
        return state.token_counts.at[slots, tokens].add(one, mode="drop"), rounds
    old = state.token_counts.at[slots, tokens].get(mode="fill", fill_value=0)
    is_full = (old & MAX_COUNT) == MAX_COUNT
    place = jnp.sum(rounds.at[slots].get(mode="clip") != NO_TOKEN, axis=1)
    return (
        state.token_counts.at[slots, tokens].add(jnp.where(is_full, -MAX_COUNT, one), mode="drop"),
        rounds.at[jnp.where(is_full, slots, len(rounds)), place].set(tokens, mode="drop"),
    )


def _tables(vocab_size: int, max_model_len: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and dtype of one slot's entry in each table."""
    num_rounds = max_model_len // (MAX_COUNT + 1)
    rounds = {"full_rounds": ((num_rounds,), np.int32)} if num_rounds else {}
    return rounds | {
        "token_counts": ((vocab_size,), np.int16),
        "allowed_bits": ((cdiv(vocab_size, WORD_BITS),), np.uint32),
        "biased_ids": ((Limits.MAX_LOGIT_BIAS,), np.int32),
        "biases": ((Limits.MAX_LOGIT_BIAS,), np.float32),
        "bad_words": ((Limits.MAX_BAD_WORDS, Limits.MAX_BAD_WORD_TOKENS), np.int32),
        "recent_tokens": ((_MAX_RECENT,), np.int32),
        "stop_ids": ((Limits.MAX_STOP_TOKEN_IDS,), np.int32),
    }


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.fromiter(token_ids, np.int32)

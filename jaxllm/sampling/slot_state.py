"""What the sampler keeps on the device about the request in each slot.

Only requests that use penalties, a logit bias, allowed ids, bad words or min_tokens own anything
here: the runner writes their slot when they are admitted (`slot_row`, then `write_slot` on the
device), and every step that samples a token updates it. The flags of a row's parameters say which
of it belongs to the row's request; whatever a slot's former owner left there is never read.

The runner owns a SlotState and donates it to each program, which returns its successor.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling import row_params
from jaxllm.sampling_params import Limits, SamplingParams

# Set in the count of every token that is in the prompt.
PROMPT_BIT = 1 << 30
NO_TOKEN = -1
_MAX_BIAS = 1e30
# Output tokens that may precede the last token of a bad word.
_MAX_RECENT = Limits.MAX_BAD_WORD_TOKENS - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """Tables with one entry per slot; S slots, V vocabulary."""

    # How often each token is in the output, plus PROMPT_BIT if it is in the prompt.
    token_counts: jax.Array  # i32 [S, V]
    # Added to the logits; -inf for all but the allowed ids.
    logit_bias: jax.Array  # f32 [S, V]
    # Token sequences, aligned to the right, NO_TOKEN before them and in unused entries.
    bad_words: jax.Array  # i32 [S, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]
    # Last output tokens, aligned to the right, NO_TOKEN before the first one.
    recent_tokens: jax.Array  # i32 [S, MAX_BAD_WORD_TOKENS - 1]
    # Tokens that min_tokens holds back, then NO_TOKEN.
    stop_ids: jax.Array  # i32 [S, MAX_STOP_TOKEN_IDS]

    # Names of the axes of tables that are cut over devices as the logits are.
    AXES: ClassVar[Mapping[str, tuple[str | None, ...]]] = {
        "token_counts": (None, "vocab"),
        "logit_bias": (None, "vocab"),
    }

    @classmethod
    def abstract(cls, num_slots: int, vocab_size: int) -> "SlotState":
        """Shapes, for compiling and planning."""
        tables: dict[str, Any] = {
            name: jax.ShapeDtypeStruct((num_slots, *shape), dtype)
            for name, (shape, dtype) in _tables(vocab_size).items()
        }
        return cls(**tables)

    @classmethod
    def zeros(cls, num_slots: int, vocab_size: int) -> "SlotState":
        abstract = cls.abstract(num_slots, vocab_size)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRow:
    """The entry of one slot, built on the host; fields as in SlotState."""

    token_counts: np.ndarray  # i32 [V]
    logit_bias: np.ndarray  # f32 [V]
    bad_words: np.ndarray  # i32 [MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS]
    recent_tokens: np.ndarray  # i32 [MAX_BAD_WORD_TOKENS - 1]
    stop_ids: np.ndarray  # i32 [MAX_STOP_TOKEN_IDS]

    @classmethod
    def abstract(cls, vocab_size: int) -> "SlotRow":
        """Shapes, for compiling."""
        entries: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(*table) for name, table in _tables(vocab_size).items()
        }
        return cls(**entries)


class AdmittedRequest(Protocol):
    """What of the scheduler's Admission is needed here."""

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


def slot_row(request: AdmittedRequest, vocab_size: int) -> SlotRow | None:
    """What a request's slot must hold when it is admitted; None if it uses none of the tables.

    A request that was preempted brings the output it has: its counts go on from there.
    """
    params = request.sampling_params
    flags = row_params.request_flags(params)
    if not flags & row_params.USES_SLOT:
        return None
    row = SlotRow(
        token_counts=np.zeros(vocab_size, np.int32),
        logit_bias=np.zeros(vocab_size, np.float32),
        bad_words=np.full((Limits.MAX_BAD_WORDS, Limits.MAX_BAD_WORD_TOKENS), NO_TOKEN, np.int32),
        recent_tokens=np.full(_MAX_RECENT, NO_TOKEN, np.int32),
        stop_ids=np.full(Limits.MAX_STOP_TOKEN_IDS, NO_TOKEN, np.int32),
    )
    if flags & row_params.PENALTIES:
        row.token_counts[:] = np.bincount(_ids(request.output_token_ids), minlength=vocab_size)
        row.token_counts[_ids(request.prompt_token_ids)] += PROMPT_BIT
    if flags & row_params.LOGIT_BIAS:
        bias = params.logit_bias or {}
        # Bounded, so that it cannot overflow when it is added: only a token that is not allowed
        # has a logit of -inf.
        values = np.array([float(value) for value in bias.values()])
        row.logit_bias[_ids(bias)] = np.clip(values, -_MAX_BIAS, _MAX_BIAS)
        if params.allowed_token_ids is not None:
            forbidden = np.ones(vocab_size, bool)
            forbidden[_ids(params.allowed_token_ids)] = False
            row.logit_bias[forbidden] = -np.inf
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
    """Replace the entry of one slot; traced, with the state donated."""
    return SlotState(
        **{
            table.name: jax.lax.dynamic_update_index_in_dim(
                getattr(state, table.name), getattr(row, table.name), slot, axis=0
            )
            for table in dataclasses.fields(SlotState)
        }
    )


def record_tokens(
    state: SlotState, tokens: jax.Array, slots: jax.Array, flags: jax.Array
) -> SlotState:
    """Add each row's new token to its slot, where the row's flags say that it is looked at."""
    num_slots = len(state.recent_tokens)
    counted = jnp.where((flags & row_params.PENALTIES) != 0, slots, num_slots)
    watched = jnp.where((flags & row_params.BAD_WORDS) != 0, slots, num_slots)
    recent = state.recent_tokens.at[slots].get(mode="clip")
    return dataclasses.replace(
        state,
        token_counts=state.token_counts.at[counted, tokens].add(1, mode="drop"),
        recent_tokens=state.recent_tokens.at[watched].set(
            jnp.concatenate([recent[:, 1:], tokens[:, None]], axis=1), mode="drop"
        ),
    )


def _tables(vocab_size: int) -> dict[str, tuple[tuple[int, ...], type]]:
    """Shape and type of one slot's entry in each table."""
    return {
        "token_counts": ((vocab_size,), np.int32),
        "logit_bias": ((vocab_size,), np.float32),
        "bad_words": ((Limits.MAX_BAD_WORDS, Limits.MAX_BAD_WORD_TOKENS), np.int32),
        "recent_tokens": ((_MAX_RECENT,), np.int32),
        "stop_ids": ((Limits.MAX_STOP_TOKEN_IDS,), np.int32),
    }


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.fromiter(token_ids, np.int32)

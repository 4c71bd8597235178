import jax
import numpy as np
import pytest

from jaxllm.sampling.slot_state import (
    MAX_COUNT,
    NO_TOKEN,
    PROMPT_BIT,
    SlotRow,
    SlotState,
    slot_row,
    write_slot,
)
from jaxllm.sampling_params import Limits, SamplingParams
from jaxllm.scheduler.schedule import Admission

VOCAB = 20


def admission(params, *, stop_ids=(), bad_words=(), prompt=(1, 1, 2), output=()):
    return Admission(
        slot=0,
        sampling_params=params,
        seed=0,
        stop_token_ids=list(stop_ids),
        bad_word_ids=[list(word) for word in bad_words],
        prompt_token_ids=list(prompt),
        output_token_ids=list(output),
    )


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=3, logprobs=2, stop="a")]
)
def test_a_plain_request_has_no_row(params):
    assert slot_row(admission(params, stop_ids=[3]), VOCAB, 64) is None


def test_counts_tell_prompt_from_output():
    row = slot_row(admission(SamplingParams(presence_penalty=1), output=[2, 5, 5]), VOCAB, 64)
    assert row is not None and row.full_rounds is None
    expected = np.zeros(VOCAB, np.int16)
    expected[[1, 2, 5]] = PROMPT_BIT, PROMPT_BIT + 1, 2
    np.testing.assert_array_equal(row.token_counts, expected)


def test_a_count_that_is_too_large_begins_again_and_notes_the_token():
    output = [2] * (2 * (MAX_COUNT + 1) + 3) + [5] * (MAX_COUNT + 1)
    row = slot_row(admission(SamplingParams(presence_penalty=1), output=output), VOCAB, 160_000)
    assert row is not None and row.full_rounds is not None
    assert row.token_counts[[2, 5]].tolist() == [PROMPT_BIT + 3, 0]
    assert row.full_rounds.tolist() == [2, 2, 5, NO_TOKEN]


def test_bias_and_allowed_ids_have_tables_of_their_own():
    params = SamplingParams(logit_bias={3: 1.5, 9: -1e300}, allowed_token_ids=[3, 4, 19])
    row = slot_row(admission(params), VOCAB, 64)
    assert row is not None
    assert row.biased_ids[:3].tolist() == [3, 9, NO_TOKEN]
    assert row.biases[:3].tolist() == [1.5, np.float32(-1e30), 0]
    assert row.allowed_bits.tolist() == [1 << 3 | 1 << 4 | 1 << 19]


def test_tables_are_small():
    tables = jax.tree.leaves(SlotState.abstract(256, 152_064, 32_767))
    assert sum(table.size * table.dtype.itemsize for table in tables) < 88e6


def test_bad_words_and_recent_output_are_aligned_to_the_right():
    params = SamplingParams(bad_words=["x", "y"])
    long_word = list(range(Limits.MAX_BAD_WORD_TOKENS))
    row = slot_row(admission(params, bad_words=[[7], long_word], output=[4, 5]), VOCAB, 64)
    assert row is not None
    assert row.bad_words[0].tolist() == [NO_TOKEN] * (Limits.MAX_BAD_WORD_TOKENS - 1) + [7]
    assert row.bad_words[1].tolist() == long_word
    assert (row.bad_words[2:] == NO_TOKEN).all()
    assert row.recent_tokens.tolist() == [NO_TOKEN] * (Limits.MAX_BAD_WORD_TOKENS - 3) + [4, 5]


def test_tables_hold_the_most_a_request_may_bring():
    params = SamplingParams(bad_words=["x"], min_tokens=1)
    words = [[i % VOCAB] * Limits.MAX_BAD_WORD_TOKENS for i in range(Limits.MAX_BAD_WORDS)]
    stop_ids = [i % VOCAB for i in range(Limits.MAX_STOP_TOKEN_IDS)]
    output = [i % VOCAB for i in range(100)]
    row = slot_row(admission(params, bad_words=words, stop_ids=stop_ids, output=output), VOCAB, 64)
    assert row is not None
    assert row.bad_words.tolist() == words
    assert row.stop_ids.tolist() == stop_ids
    assert row.recent_tokens.tolist() == output[-(Limits.MAX_BAD_WORD_TOKENS - 1) :]


def test_write_slot_replaces_one_entry_and_no_other():
    rng = np.random.default_rng(0)
    abstract = SlotState.abstract(4, VOCAB, 70_000)
    before = jax.tree.map(lambda leaf: rng.integers(0, 9, leaf.shape).astype(leaf.dtype), abstract)
    row = jax.tree.map(
        lambda leaf: rng.integers(0, 9, leaf.shape).astype(leaf.dtype),
        SlotRow.abstract(VOCAB, 70_000),
    )
    after = jax.jit(write_slot)(before, np.int32(2), row)
    for old, new, entry in zip(*map(jax.tree.leaves, (before, after, row)), strict=True):
        np.testing.assert_array_equal(new[2], entry)
        np.testing.assert_array_equal(np.delete(new, 2, axis=0), np.delete(old, 2, axis=0))

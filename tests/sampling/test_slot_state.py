import jax
import numpy as np
import pytest

from jaxllm.sampling.slot_state import (
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
    assert slot_row(admission(params, stop_ids=[3]), VOCAB) is None


def test_counts_tell_prompt_from_output():
    row = slot_row(admission(SamplingParams(presence_penalty=1), output=[2, 5, 5]), VOCAB)
    assert row is not None
    expected = np.zeros(VOCAB, np.int32)
    expected[[1, 2, 5]] = PROMPT_BIT, PROMPT_BIT + 1, 2
    np.testing.assert_array_equal(row.token_counts, expected)


def test_bias_and_allowed_ids_combine():
    params = SamplingParams(logit_bias={3: 1.5, 4: -2.0, 9: 7.0}, allowed_token_ids=[3, 4, 5])
    row = slot_row(admission(params), VOCAB)
    assert row is not None
    expected = np.full(VOCAB, -np.inf, np.float32)
    expected[3:6] = 1.5, -2, 0
    np.testing.assert_array_equal(row.logit_bias, expected)


def test_bad_words_and_recent_output_are_aligned_to_the_right():
    params = SamplingParams(bad_words=["x", "y"])
    long_word = list(range(Limits.MAX_BAD_WORD_TOKENS))
    row = slot_row(admission(params, bad_words=[[7], long_word], output=[4, 5]), VOCAB)
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
    row = slot_row(admission(params, bad_words=words, stop_ids=stop_ids, output=output), VOCAB)
    assert row is not None
    assert row.bad_words.tolist() == words
    assert row.stop_ids.tolist() == stop_ids
    assert row.recent_tokens.tolist() == output[-(Limits.MAX_BAD_WORD_TOKENS - 1) :]


def test_write_slot_replaces_one_entry_and_no_other():
    rng = np.random.default_rng(0)
    abstract = SlotState.abstract(4, VOCAB)
    before = jax.tree.map(lambda leaf: rng.integers(0, 9, leaf.shape).astype(leaf.dtype), abstract)
    row = jax.tree.map(
        lambda leaf: rng.integers(0, 9, leaf.shape).astype(leaf.dtype), SlotRow.abstract(VOCAB)
    )
    after = jax.jit(write_slot)(before, np.int32(2), row)
    for old, new, entry in zip(*map(jax.tree.leaves, (before, after, row)), strict=True):
        np.testing.assert_array_equal(new[2], entry)
        np.testing.assert_array_equal(np.delete(new, 2, axis=0), np.delete(old, 2, axis=0))


def test_zeros_have_the_abstract_shapes():
    zeros, abstract = SlotState.zeros(3, VOCAB), SlotState.abstract(3, VOCAB)
    for made, wanted in zip(jax.tree.leaves(zeros), jax.tree.leaves(abstract), strict=True):
        assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)

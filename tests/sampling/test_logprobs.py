import functools

import jax
import numpy as np
import pytest

from jaxllm.sampling.choose import most_likely
from jaxllm.sampling.layout import LAYOUTS
from jaxllm.sampling.logprobs import token_logprobs

LAYOUT = LAYOUTS["tpu"]  # which narrows rows in parts


def logprobs_of(logits, targets, *, k, wants_more=True):
    best = most_likely(logits, LAYOUT)
    return token_logprobs(logits, targets, best, k=k, wants_more=wants_more, layout=LAYOUT)


@pytest.mark.parametrize("k", [0, 1, 5, 40])
def test_logprobs_and_ranks(rng, k):
    vocab_size = 40
    logits = rng.normal(0, 4, (6, vocab_size)).astype(np.float32)
    targets = rng.integers(0, vocab_size, 6).astype(np.int32)
    targets[0], targets[1] = logits[0].argmax(), logits[1].argmin()
    out = jax.jit(functools.partial(logprobs_of, k=k))(logits, targets)
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    best = np.argsort(-logits, axis=1)[:, :k]
    ids = np.concatenate([targets[:, None], best], axis=1)
    np.testing.assert_array_equal(out.token_ids, ids)
    np.testing.assert_allclose(out.logprobs, np.take_along_axis(exact, ids, 1), atol=1e-5)
    ranks = 1 + (logits > np.take_along_axis(logits, targets[:, None], 1)).sum(axis=1)
    np.testing.assert_array_equal(out.ranks, ranks)
    assert out.ranks[0] == 1 and out.ranks[1] == vocab_size


def test_equally_likely_tokens_share_a_rank():
    logits = np.asarray([[3, 1, 3, 0], [3, 1, 3, 0]], np.float32)
    out = logprobs_of(logits, np.asarray([2, 1], np.int32), k=2)
    assert out.ranks.tolist() == [1, 3]


def test_only_the_best_is_there_when_no_row_wants_more_and_the_same_to_the_bit(rng):
    logits = rng.normal(0, 4, (6, 1000)).astype(np.float32)
    targets = rng.integers(0, 1000, 6).astype(np.int32)
    program = jax.jit(functools.partial(logprobs_of, k=20))
    few, many = (program(logits, targets, wants_more=more) for more in (False, True))
    np.testing.assert_array_equal(few.token_ids[:, :2], many.token_ids[:, :2])
    np.testing.assert_array_equal(few.logprobs[:, :2], many.logprobs[:, :2])
    np.testing.assert_array_equal(few.ranks, many.ranks)
    assert not few.token_ids[:, 2:].any()
    assert many.token_ids[:, 2:].any()

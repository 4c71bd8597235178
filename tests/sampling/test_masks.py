"""A row with a mask gets a token of its mask, whatever other parameters say."""

import dataclasses

import numpy as np
import pytest

from jaxllm.config import EngineConfig
from jaxllm.sampling.layout import LAYOUTS
from jaxllm.sampling.logits_processor import LogitsProcessor
from jaxllm.sampling_params import SamplingParams

VOCAB, SLOTS = 70, 8
# Three rows at a time, of which some are computed twice. What is done with masks does not depend on
# the rest of a layout.
FEW = dataclasses.replace(LAYOUTS["cpu"], max_rows=3)


class LikesToken5(LogitsProcessor):
    """Gives a token a logit, whether or not it had one."""

    def encode(self, params):
        return ()

    def apply(self, logits, params, output_index):
        return logits.at[:, 5].set(100.0)


@pytest.fixture
def sampler(driver):
    def make(params, processors=(), **admitted):
        its = driver(VOCAB, SLOTS, processors)
        if its.layout is LAYOUTS["cpu"]:
            its.layout = FEW
        for slot in range(SLOTS):
            its.admit(slot, params, seed=slot, **admitted)
        return its

    return make


@pytest.fixture
def masks():
    """One token, two, and so on, up to all."""
    rng = np.random.default_rng(1)
    counts = [1, 2, 3, 10, 33, 60, 69, 70]
    masks = np.zeros((SLOTS, VOCAB), bool)
    for row, count in enumerate(counts):
        masks[row, rng.permutation(VOCAB)[:count]] = True
    return masks


def logits_of(seed=0):
    return np.random.default_rng(seed).normal(size=(SLOTS, VOCAB)).astype(np.float32) * 3


def test_greedy_rows_take_the_best_of_their_mask(sampler, masks):
    its = sampler(SamplingParams(temperature=0))
    tokens = its.step(logits_of(), range(SLOTS), masks=masks).tokens
    assert tokens.tolist() == np.where(masks, logits_of(), -np.inf).argmax(axis=1).tolist()


def test_drawn_tokens_are_in_the_mask(sampler, masks):
    its = sampler(SamplingParams(temperature=2.0, top_k=40, repetition_penalty=1.5))
    seen = set()
    for seed in range(30):
        tokens = its.step(logits_of(seed), range(SLOTS), masks=masks).tokens
        assert masks[np.arange(SLOTS), tokens].all()
        seen |= set(tokens.tolist())
    assert len(seen) > 30


def test_a_mask_of_all_tokens_changes_nothing(sampler):
    params = SamplingParams(
        temperature=0.9, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5, min_tokens=3,
        logit_bias={7: 3.0}, bad_words=["a"], logprobs=3,
    )  # fmt: skip
    admitted = {"stop_ids": [9], "bad_words": [[11], [3, 4]], "prompt": [1, 2, 3]}
    plain, masked = sampler(params, **admitted), sampler(params, **admitted)
    for seed in range(5):
        due = plain.step(logits_of(seed), range(SLOTS))
        out = masked.step(logits_of(seed), range(SLOTS), masks=np.ones((SLOTS, VOCAB), bool))
        assert out.tokens.tolist() == due.tokens.tolist()
        for ours, its in zip(out.logprobs, due.logprobs, strict=True):
            assert (ours == its).all()
    for ours, its in zip(masked.state.token_counts, plain.state.token_counts, strict=True):
        assert (ours == its).all()


def test_logprobs_are_those_of_all_tokens(sampler, masks):
    its = sampler(SamplingParams(temperature=0, logprobs=2))
    out, logits = its.step(logits_of(), range(SLOTS), masks=masks), logits_of().astype(float)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    rows = np.arange(SLOTS)
    assert out.logprobs.logprobs[:, 0] == pytest.approx(expected[rows, out.tokens], abs=1e-4)
    assert (out.logprobs.token_ids[:, 1] == logits.argmax(axis=1)).all()


def test_allowed_ids_narrow_a_mask_and_never_widen_it(sampler, masks):
    allowed = np.isin(np.arange(VOCAB), range(20))
    its = sampler(SamplingParams(temperature=0, allowed_token_ids=list(range(20))))
    tokens = its.step(logits_of(), range(SLOTS), masks=masks).tokens
    both = masks & allowed
    effective = np.where(both.any(axis=1, keepdims=True), both, masks)
    assert (effective != both).any() and (both.sum(axis=1) > 1).any()
    assert tokens.tolist() == np.where(effective, logits_of(), -np.inf).argmax(axis=1).tolist()


def test_bans_that_leave_nothing_of_a_mask_are_not_obeyed(sampler, masks):
    banned = np.flatnonzero(masks[1])
    its = sampler(
        SamplingParams(temperature=1.0, min_tokens=9, bad_words=["a"]),
        stop_ids=banned[:1].tolist(),
        bad_words=[[int(token)] for token in banned[1:]],
    )
    tokens = its.step(logits_of(), range(SLOTS), masks=masks).tokens
    assert tokens[1] in banned
    free = [row for row in range(SLOTS) if (masks[row] & ~np.isin(np.arange(VOCAB), banned)).any()]
    assert masks[np.arange(SLOTS), tokens].all()
    assert not np.isin(tokens[free], banned).any()


def test_a_users_processor_gives_back_no_token(sampler, masks):
    masks = masks.copy()
    masks[:4, 5], masks[4:, 5] = False, True
    its = sampler(SamplingParams(temperature=0), (LikesToken5(EngineConfig.create("m")),))
    tokens = its.step(logits_of(), range(SLOTS), masks=masks).tokens
    assert (tokens[4:] == 5).all() and masks[np.arange(SLOTS), tokens].all()


def test_a_row_of_nan_is_not_valid_and_the_others_are(sampler, masks):
    logits = logits_of()
    logits[2] = np.nan
    out = sampler(SamplingParams(temperature=1.0)).step(logits, range(SLOTS), masks=masks)
    assert out.is_valid.tolist() == [row != 2 for row in range(SLOTS)]


def test_rows_that_do_not_sample_are_not_counted(sampler, masks):
    its = sampler(SamplingParams(temperature=1.0, presence_penalty=1.0))
    before = np.array(its.state.token_counts)
    samples = np.arange(SLOTS) % 2 == 0
    its.step(logits_of(), range(SLOTS), samples=samples, masks=masks)
    changed = (np.array(its.state.token_counts) != before).any(axis=1)
    assert changed.tolist() == samples.tolist()

"""The native sampler chooses what XLA's code does, for all that rows may want."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.sampler.api import LogprobOutput
from jaxllm_kernels.sampler.native import NativeSampler

from jaxllm.sampling import row_params
from jaxllm.sampling.choose import most_likely
from jaxllm.sampling.layout import LAYOUTS
from jaxllm.sampling.logprobs import token_logprobs
from jaxllm.sampling.sampler import sample
from jaxllm.sampling.slot_state import MAX_COUNT, NO_TOKEN, PROMPT_BIT, SlotState
from jaxllm.sampling_params import SamplingParams

# No number of blocks, nor of words.
VOCAB, ROWS, SLOTS, K = 4099, 8, 11, 5
PENDING = 3


@functools.partial(jax.jit, static_argnames="layout")
def step(logits, packed, slots, samples, numbers, state, masks, pending, *, layout):
    return sample(
        logits,
        row_params.decode(packed),
        slots=slots,
        samples=samples,
        output_index=numbers,
        positions=numbers,
        state=state,
        num_logprobs=K,
        layout=layout,
        masks=masks,
        pending=pending,
    )


def draw_params(rng) -> SamplingParams:
    def maybe(value, otherwise):
        return value if rng.random() < 0.4 else otherwise

    return SamplingParams(
        temperature=maybe(0.0, rng.choice([0.05, 0.7, 1.0, 2.0])),
        top_k=maybe(int(rng.choice([1, 2, 20, 33, 500, VOCAB])), 0),
        top_p=maybe(rng.uniform(0.05, 1), 1.0),
        min_p=maybe(rng.choice([0.5, 0.05, 1e-4]), 0.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        repetition_penalty=maybe(rng.uniform(0.5, 2), 1.0),
        logit_bias=maybe({0: 1.0}, None),
        allowed_token_ids=maybe([0], None),
        bad_words=maybe(["a"], None),
        min_tokens=maybe(40, 0),
        max_tokens=100,
        logprobs=maybe(int(rng.choice([0, 1, K])), None),
    )


def draw_state(rng, max_model_len) -> SlotState:
    """Tables in which words are complete, and some counts full."""
    counts = np.zeros((SLOTS, VOCAB), np.int16)
    for slot in range(SLOTS):
        at = rng.integers(0, VOCAB, 60)
        counts[slot, at] = rng.choice([1, 2, 30, MAX_COUNT, PROMPT_BIT, PROMPT_BIT | 7], 60)
    words = rng.integers(0, 3, (SLOTS, *SlotState.abstract(1, 1, 1).bad_words.shape[1:]))
    words[:, :, :-3] = NO_TOKEN
    words[:, 9:] = NO_TOKEN
    words[:, :9, -1] = rng.integers(0, VOCAB, (SLOTS, 9))
    shapes = SlotState.abstract(SLOTS, VOCAB, max_model_len)
    made = {
        "token_counts": counts,
        "full_rounds": rng.integers(0, 40, (SLOTS, 3)),
        "allowed_bits": rng.integers(0, 1 << 32, shapes.allowed_bits.shape, np.uint32),
        "biased_ids": rng.integers(-1, 40, shapes.biased_ids.shape),
        "biases": rng.normal(size=shapes.biases.shape),
        "bad_words": words,
        "recent_tokens": rng.integers(0, 3, shapes.recent_tokens.shape),
        "stop_ids": rng.integers(-1, VOCAB, shapes.stop_ids.shape),
    }
    made["full_rounds"][:, 2] = NO_TOKEN
    arrays = {
        name: jnp.asarray(array, getattr(shapes, name).dtype)
        for name, array in made.items()
        if getattr(shapes, name) is not None
    }
    return SlotState(**{"full_rounds": None, **arrays})


def draw_logits(rng):
    """Logits like those of models, flat ones, ones with ties, and columns that are impossible."""
    logits = rng.normal(size=(ROWS, VOCAB)) * rng.choice([0.1, 1, 3, 8], (ROWS, 1))
    logits[:2] = np.round(logits[:2]) + 0.0  # an XLA `top_k` has -0 behind 0
    logits[:, -5:] = -np.inf
    logits[:, rng.integers(0, VOCAB, 40)] = -np.inf
    return logits.astype(np.float32)


# Without masks and pending tokens, and with a table of full rounds; and the other way round.
@pytest.mark.parametrize("alone", [True, False])
def test_it_chooses_what_xla_does(native_layout, alone):
    rng = np.random.default_rng(alone)
    state = draw_state(rng, 3 * (MAX_COUNT + 1) if alone else 100)
    num_compared = 0
    for turn in range(150):
        logits = draw_logits(rng)
        if turn % 10 == 0:
            logits[3] = rng.choice([np.nan, -np.inf])
            logits[4, rng.integers(VOCAB)] = rng.choice([np.nan, np.inf])
        rows = [draw_params(rng) for _ in range(ROWS)]
        masks = pending = None
        if not alone:
            words = rng.integers(0, 1 << 32, (ROWS, 130), np.uint32)
            masks = jnp.asarray(words & rng.integers(0, 1 << 32, (ROWS, 1), np.uint32))
            pending = rng.integers(0, 5, (ROWS, PENDING)).astype(np.int32)
            pending[np.arange(PENDING) >= rng.integers(0, PENDING + 1, (ROWS, 1))] = NO_TOKEN
        slots = rng.permutation(SLOTS + 3)[:ROWS].astype(np.int32)
        samples = (rng.random(ROWS) < 0.9) & (slots < SLOTS)
        arguments = (
            logits,
            np.stack([row_params.encode(params, int(rng.integers(1 << 63))) for params in rows]),
            np.minimum(slots, SLOTS),
            samples,
            rng.integers(0, 80, ROWS).astype(np.int32),
            state,
            masks,
            pending,
        )
        its = jax.device_get(step(*arguments, layout=native_layout))
        due = jax.device_get(step(*arguments, layout=LAYOUTS["cpu"]))
        np.testing.assert_array_equal(its.is_valid, due.is_valid)
        valid = its.is_valid
        np.testing.assert_array_equal(its.tokens[valid], due.tokens[valid])
        num_compared += np.count_nonzero(valid)
        for row in np.flatnonzero(valid & samples):
            n = rows[row].logprobs
            if n is None:
                assert not any(np.any(part[row]) for part in its.logprobs)
                continue
            mine, other = (LogprobOutput(*(x[row] for x in out.logprobs)) for out in (its, due))
            np.testing.assert_array_equal(mine.token_ids[: n + 1], other.token_ids[: n + 1])
            np.testing.assert_allclose(mine.normalisers, other.normalisers, rtol=1e-6)
            off = 1e-6 * (1 + abs(float(other.normalisers)))
            np.testing.assert_allclose(mine.logprobs[: n + 1], other.logprobs[: n + 1], atol=off)
            assert mine.ranks == other.ranks
        if np.all(valid):  # what a row that is not valid gets, is counted, and may differ
            jax.tree.map(np.testing.assert_array_equal, its.state, due.state)
        state = jax.tree.map(jnp.asarray, due.state)
    assert num_compared > 1100


@pytest.mark.parametrize(("k", "wants_more"), [(0, False), (K, False), (K, True)])
def test_logprobs_of_given_tokens_are_those_of_xla(native_layout, k, wants_more):
    rng = np.random.default_rng(k)
    logits = draw_logits(rng)
    logits[1, ::2] = -np.inf
    logits[2] = np.round(logits[2])  # with equal ones
    targets = rng.integers(0, VOCAB, ROWS).astype(np.int32)
    targets[3] = logits[3].argmax()
    targets[4] = VOCAB - 1
    targets[5] = VOCAB  # as no request has
    logits[6, rng.integers(VOCAB)] = np.nan
    logits[7, rng.integers(VOCAB)] = np.inf
    wants_more = jnp.array(wants_more)
    layout = LAYOUTS["cpu"]

    @jax.jit
    def both():
        best = most_likely(jnp.asarray(logits), layout)
        due = token_logprobs(logits, targets, best, k=k, wants_more=wants_more, layout=layout)
        its = native_layout.op.logprobs(logits, targets, num_logprobs=k, wants_more=wants_more)
        return its, due

    its, due = jax.device_get(both())
    # Their requests end with an error.
    bad = ~np.isfinite(due.logprobs[:, 0])
    assert {5, 6, 7} <= set(np.flatnonzero(bad)) and np.count_nonzero(~bad) >= 3
    np.testing.assert_array_equal(~np.isfinite(its.logprobs[:, 0]), bad)
    its, due = jax.tree.map(lambda x: x[~bad], (its, due))
    np.testing.assert_array_equal(its.ranks, due.ranks)
    np.testing.assert_allclose(its.normalisers, due.normalisers, rtol=1e-6)
    n = 1 + (k if wants_more else min(k, 1))  # nobody looks at others
    np.testing.assert_array_equal(its.token_ids[:, :n], due.token_ids[:, :n])
    np.testing.assert_allclose(its.logprobs[:, :n], due.logprobs[:, :n], rtol=1e-5, atol=1e-5)


def test_a_row_has_the_bits_alone_that_it_has_in_a_crowd(native_layout):
    rng = np.random.default_rng(5)
    state = draw_state(rng, 3 * (MAX_COUNT + 1))
    params = SamplingParams(temperature=1, top_p=0.9, presence_penalty=1, logprobs=K)
    logits = draw_logits(rng)
    packed = np.stack([row_params.encode(params, seed) for seed in range(ROWS)])
    numbers = np.arange(ROWS, dtype=np.int32)

    def run(rows):
        many = (logits[rows], packed[rows], numbers[rows], numbers[rows] >= 0, numbers[rows])
        out = step(*many, state, None, None, layout=native_layout)
        return jax.device_get((out.tokens, out.logprobs))

    crowd = run(np.s_[:])
    for row in range(ROWS):
        jax.tree.map(
            lambda one, all_, row=row: np.testing.assert_array_equal(one[0], all_[row]),
            run(np.s_[row : row + 1]),
            crowd,
        )


def test_penalties_that_make_infinite_logits_disturb_no_row(native_layout):
    rng = np.random.default_rng(6)
    state = draw_state(rng, 3 * (MAX_COUNT + 1))
    counts = np.array(state.token_counts)
    counts[:, 7] = PROMPT_BIT
    state = dataclasses.replace(state, token_counts=jnp.asarray(counts))
    logits = np.abs(draw_logits(rng))
    logits[np.isinf(logits)] = -np.inf
    logits[:, 7] = 20
    for temperature, penalty in itertools.product((0, 1), (1e-38, 1e-30)):
        params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
        arguments = (
            logits,
            np.stack([row_params.encode(params, seed) for seed in range(ROWS)]),
            *[np.arange(ROWS, dtype=np.int32), np.ones(ROWS, bool)],
            *[np.arange(ROWS, dtype=np.int32), state, None, None],
        )
        its, due = (step(*arguments, layout=one) for one in (native_layout, LAYOUTS["cpu"]))
        np.testing.assert_array_equal(its.is_valid, due.is_valid)
        np.testing.assert_array_equal(its.tokens, due.tokens)


def test_the_op_says_what_it_is_made_of(native_layout):
    """Its text is part of the identity of programs."""
    assert isinstance(native_layout.op, NativeSampler)
    assert native_layout.op.library.build in repr(native_layout)

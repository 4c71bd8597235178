import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling import choose, row_params
from jaxllm.sampling.layout import LAYOUTS
from jaxllm.sampling_params import SamplingParams

DRAWS = 4096


# That of GPUs has the blocks of one and the arg-max of the other.
of_each_layout = pytest.mark.parametrize(
    "layout", [LAYOUTS["cpu"], LAYOUTS["tpu"]], ids=["cpu", "tpu"]
)


@functools.partial(jax.jit, static_argnames="layout")
def _draw(logits, packed, positions, layout):
    params = row_params.decode(packed)
    random = (params.flags & row_params.RANDOM) != 0
    largest = choose.most_likely(logits, layout).logits
    return choose.draw(
        logits, params, random=random, positions=positions, largest=largest, layout=layout
    )


def draws(logits, *, seed=0, layout=LAYOUTS["cpu"], num_draws=DRAWS, **fields):
    """Many draws from one distribution: at successive positions of one request."""
    row = row_params.encode(SamplingParams(**fields), seed)
    positions = np.arange(num_draws, dtype=np.int32)
    logits = np.tile(np.asarray(logits, np.float32), (num_draws, 1))
    return np.asarray(_draw(logits, np.tile(row, (num_draws, 1)), positions, layout))


def chi_square(tokens, probabilities):
    """The statistic, in standard deviations from its mean, over tokens that are expected."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * len(tokens)
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


@of_each_layout
@pytest.mark.parametrize("vocab_size", [12, 128, 300])
def test_draws_follow_the_softmax(rng, vocab_size, layout):
    logits = rng.normal(0, 1, vocab_size)
    tokens = draws(logits, seed=1, layout=layout)
    assert abs(chi_square(tokens, np.exp(logits) / np.exp(logits).sum())) < 3


def test_draws_of_many_blocks_follow_the_softmax(rng):
    # Blocks of very different weights: some are nearly impossible.
    logits = rng.normal(0, 1, 2000) + np.repeat(rng.normal(0, 2, 16), 125)
    p = np.exp(logits) / np.exp(logits).sum()
    tokens = np.concatenate([draws(logits, seed=seed, num_draws=8192) for seed in range(8)])
    # Pearson's statistic needs some expected draws of every token: rare ones count as one.
    rare = p * len(tokens) < 8
    order = np.cumsum(~rare)
    places = np.where(rare, 0, order)
    merged = np.bincount(places, weights=p)
    assert abs(chi_square(places[tokens], merged)) < 3


def test_two_draws_of_a_request_are_independent(rng):
    logits = rng.normal(0, 1, 6)
    tokens = draws(logits, seed=4, num_draws=2 * DRAWS)
    p = np.exp(logits) / np.exp(logits).sum()
    pairs = tokens[0::2] * 6 + tokens[1::2]
    assert abs(chi_square(pairs, np.outer(p, p).ravel())) < 3
    # Blocks and places have noise of their own: which block says nothing of the place in it.
    logits = np.repeat(np.log([0.5, 0.3, 0.2]), 128)
    tokens = draws(logits, seed=5)
    halves = tokens // 128 * 2 + (tokens % 128 >= 64)
    assert abs(chi_square(halves, np.repeat([0.25, 0.15, 0.1], 2))) < 3


def test_draws_follow_the_temperature(rng):
    logits = rng.normal(0, 1, 12)
    for temperature in (0.5, 2.0):
        expected = np.exp(logits / temperature)
        tokens = draws(logits, seed=2, temperature=temperature)
        assert abs(chi_square(tokens, expected / expected.sum())) < 3


def test_draws_follow_the_cuts(rng):
    logits = np.log([0.4, 0.3, 0.15, 0.1, 0.05])[rng.permutation(5)]
    for fields, kept in (
        ({"top_k": 3}, 3),
        ({"top_p": 0.8}, 3),
        ({"min_p": 0.3}, 3),
        ({"top_k": 4, "top_p": 0.7}, 2),
        ({"top_k": 1}, 1),
    ):
        p = np.exp(logits)
        p[p < np.sort(p)[-kept]] = 0
        tokens = draws(logits, seed=3, **fields)
        if kept == 1:
            assert (tokens == p.argmax()).all()
        else:
            assert abs(chi_square(tokens, p / p.sum())) < 3, fields


def test_seeds_and_positions_give_different_draws():
    logits = np.zeros(12)
    first = draws(logits, seed=0)
    for seed in (1, 1 << 32, 2**64 - 1):
        assert (draws(logits, seed=seed) == first).mean() < 0.2
    assert (first[1:] == first[:-1]).mean() < 0.2
    np.testing.assert_array_equal(draws(logits, seed=0), first)


def test_impossible_tokens_are_never_drawn(rng):
    # Only a few tokens of many blocks are possible, the last one of the vocabulary not among them.
    logits = np.full(1000, -np.inf)
    possible = rng.choice(900, 5, replace=False)
    logits[possible] = rng.normal(0, 1, 5)
    assert set(draws(logits)) == set(possible)


def test_noise_is_finite_for_all_bits_and_keeps_its_largest_values():
    bits = np.array([0, 1, 2, 1 << 8, 1 << 31, (1 << 32) - 300, (1 << 32) - 1], np.uint32)
    noise = np.asarray(jax.jit(choose._gumbel)(bits))
    exact = -np.log(-np.log1p(-(bits.astype(np.float64) + 0.5) * 2.0**-32))
    assert np.isfinite(noise).all() and (np.diff(noise) <= 0).all()
    np.testing.assert_allclose(noise[:-2], exact[:-2], rtol=1e-5)
    assert noise[0] > 22  # where 24 bits would end at 17


def test_noise_is_that_of_the_number_whatever_the_vocabulary():
    seeds, positions = jnp.asarray([[0, 7], [3, 1 << 31]], jnp.uint32), jnp.asarray([5, 6])
    few, many = choose._noise(seeds, positions, 128), choose._noise(seeds, positions, 1002)
    for some, more in zip(few, many, strict=True):
        np.testing.assert_array_equal(some, more[:, :128])
    values = np.concatenate([np.ravel(noise) for noise in many])
    assert len(np.unique(values)) > 0.99 * len(values)


@of_each_layout
@pytest.mark.parametrize("small", [1e-37, 1e-39, 0.0])
def test_weights_near_nothing_do_not_mislead_the_draw(small, layout):
    # Where a block's sum is a number, its tokens' weights are, too.
    with np.errstate(divide="ignore"):
        logits = np.full(1000, np.log(small))
    logits[::128] = -np.inf
    logits[700] = 0
    tokens = draws(logits, layout=layout)
    assert (tokens == 700).all()


@of_each_layout
def test_a_row_that_is_no_distribution_gets_a_token_of_the_vocabulary(layout):
    for value in (np.nan, np.inf, -np.inf):
        tokens = draws(np.full(300, value), layout=layout, top_p=0.9)
        assert ((tokens >= 0) & (tokens < 300)).all(), value


def test_overflow_by_temperature_leaves_the_largest(rng):
    logits = rng.normal(0, 1, 12)
    logits[3] = 3e38
    assert (draws(logits, temperature=0.01) == 3).all()


@of_each_layout
@pytest.mark.parametrize("vocab_size", [1, 5, 127, 128, 129, 1000])
def test_most_likely_is_the_first_arg_max(rng, vocab_size, layout):
    logits = rng.integers(-5, 6, (16, vocab_size)).astype(np.float32)
    logits[0] = -np.inf
    tokens, largest = jax.jit(choose.most_likely, static_argnums=1)(logits, layout)
    np.testing.assert_array_equal(largest, logits.max(axis=1))
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling import choose, row_params
from jaxllm.sampling_params import SamplingParams

DRAWS = 4096


@jax.jit
def _draw(logits, packed, positions):
    params = row_params.decode(packed)
    random = (params.flags & row_params.RANDOM) != 0
    return choose.draw(logits, params, random=random, positions=positions)


def draws(logits, *, seed=0, **fields):
    """Many draws from one distribution: at successive positions of one request."""
    row = row_params.encode(SamplingParams(**fields), seed)
    positions = np.arange(DRAWS, dtype=np.int32)
    logits = np.tile(np.asarray(logits, np.float32), (DRAWS, 1))
    return np.asarray(_draw(logits, np.tile(row, (DRAWS, 1)), positions))


def chi_square(tokens, probabilities):
    """The statistic, in standard deviations from its mean, over tokens that are expected."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible] * len(tokens)
    statistic = ((counts[possible] - expected) ** 2 / expected).sum()
    freedom = possible.sum() - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab_size", [12, 128, 300])
def test_draws_follow_the_softmax(rng, vocab_size):
    logits = rng.normal(0, 1, vocab_size)
    tokens = draws(logits, seed=1)
    assert abs(chi_square(tokens, np.exp(logits) / np.exp(logits).sum())) < 3


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


@pytest.mark.parametrize("uniform", [0.0, 0.3, 0.5, 1 - 2**-24, 1.0])
def test_pick_takes_something_with_weight_whatever_the_rounding(uniform):
    weights = np.zeros((6, 9), np.float32)
    weights[0, 4] = 1
    weights[1, [2, 6]] = 1
    weights[2, 1:8] = 1 / 7
    weights[3, [3, 5]] = 1e-37, 1e-37
    weights[4, [3, 5]] = 1e30, 1e-30
    weights[5, 8] = 1
    picked = np.asarray(jax.jit(choose._pick)(weights, jnp.full(6, uniform)))
    for row, index in zip(weights, picked, strict=True):
        assert row[index] > 0


def test_rounding_at_the_end_picks_the_last_that_has_weight():
    weights = jnp.asarray([[0.5, 0.25, 0.0, 0.25, 0.0, 0.0]])
    assert choose._pick(weights, jnp.asarray([1.0]))[0] == 3
    assert choose._pick(weights, jnp.asarray([0.0]))[0] == 0
    assert choose._pick(weights, jnp.asarray([0.75]))[0] == 3
    assert choose._pick(weights, jnp.asarray([0.5]))[0] == 1


def test_rounding_inside_the_sums_does_not_pick_what_has_no_weight(rng):
    # XLA adds up in an order of its own, so a sum may grow where nothing was added.
    weights = rng.exponential(1, (2000, 300)).astype(np.float32)
    weights[rng.random(weights.shape) < 0.6] = 0
    sums = np.asarray(jnp.cumsum(jnp.asarray(weights), axis=1))
    rows, grown = np.nonzero((np.diff(sums, axis=1) > 0) & (weights[:, 1:] == 0))
    edges = sums[rows, grown] / sums[rows, -1]
    picked = choose._pick(jnp.asarray(weights[rows]), jnp.asarray(edges))
    assert (weights[rows, picked] > 0).all()


def test_overflow_by_temperature_leaves_the_largest(rng):
    logits = rng.normal(0, 1, 12)
    logits[3] = 3e38
    assert (draws(logits, temperature=0.01) == 3).all()


@pytest.mark.parametrize("vocab_size", [1, 5, 127, 128, 129, 1000])
def test_most_likely_is_the_first_arg_max(rng, vocab_size):
    logits = rng.integers(-5, 6, (16, vocab_size)).astype(np.float32)
    logits[0] = -np.inf
    tokens, largest = jax.jit(choose.most_likely)(logits)
    np.testing.assert_array_equal(largest, logits.max(axis=1))
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))

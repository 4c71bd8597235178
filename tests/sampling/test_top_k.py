import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling.top_k import top_k


@pytest.fixture(params=[128, 1 << 31])
def max_columns(request):
    """Where a CPU takes one wide `top_k`, others narrow rows in parts."""
    return request.param


def assert_as_xla_says(x, k, max_columns):
    values, columns = jax.jit(functools.partial(top_k, k=k, max_columns=max_columns))(x)
    expected_values, expected_columns = jax.lax.top_k(x, k)
    assert columns.dtype == jnp.int32
    np.testing.assert_array_equal(columns, expected_columns)
    np.testing.assert_array_equal(values, expected_values)


@pytest.mark.parametrize("k", [0, 1, 5, 20, 32, 33])
@pytest.mark.parametrize("width", [40, 64, 387, 2113, 8192, 32001])
def test_columns_are_those_of_one_wide_top_k(max_columns, rng, width, k):
    assert_as_xla_says(jnp.asarray(rng.normal(0, 4, (5, width)), jnp.float32), k, max_columns)


@pytest.mark.parametrize("k", [1, 20, 32])
def test_the_first_of_equals_is_taken(max_columns, rng, k):
    assert_as_xla_says(jnp.asarray(rng.integers(0, 4, (5, 5003)), jnp.float32), k, max_columns)
    assert_as_xla_says(jnp.zeros((2, 5003), jnp.float32), k, max_columns)


def test_padding_is_never_taken(max_columns, rng):
    x = np.full((3, 5003), -np.inf, np.float32)
    x[1, 5002], x[2, rng.integers(0, 5003, 7)] = 1, 2
    assert_as_xla_says(jnp.asarray(x), 20, max_columns)

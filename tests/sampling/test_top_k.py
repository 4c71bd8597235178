import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.sampling import top_k as module
from jaxllm.sampling.top_k import top_k


@pytest.fixture(params=["cpu", "elsewhere"], autouse=True)
def platform(request, monkeypatch):
    """Rows are narrowed in parts where a CPU takes one wide `top_k`."""
    if request.param == "elsewhere":
        monkeypatch.setattr(module, "_narrow_top_k", module._in_parts)


def assert_as_xla_says(x, k):
    values, columns = jax.jit(functools.partial(top_k, k=k))(x)
    expected_values, expected_columns = jax.lax.top_k(x, k)
    assert columns.dtype == jnp.int32
    np.testing.assert_array_equal(columns, expected_columns)
    np.testing.assert_array_equal(values, expected_values)


@pytest.mark.parametrize("k", [0, 1, 5, 20, 32, 33])
@pytest.mark.parametrize("width", [40, 64, 387, 2113, 8192, 32001])
def test_columns_are_those_of_one_wide_top_k(rng, width, k):
    assert_as_xla_says(jnp.asarray(rng.normal(0, 4, (5, width)), jnp.float32), k)


@pytest.mark.parametrize("k", [1, 20, 32])
def test_the_first_of_equals_is_taken(rng, k):
    assert_as_xla_says(jnp.asarray(rng.integers(0, 4, (5, 5003)), jnp.float32), k)
    assert_as_xla_says(jnp.zeros((2, 5003), jnp.float32), k)


def test_padding_is_never_taken(rng):
    x = np.full((3, 5003), -np.inf, np.float32)
    x[1, 5002], x[2, rng.integers(0, 5003, 7)] = 1, 2
    assert_as_xla_says(jnp.asarray(x), 20)

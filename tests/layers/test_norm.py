"""Norms against their formulas."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.layers.norm import LayerNormSpec, RMSNorm, RMSNormSpec


def test_root_mean_square_becomes_the_weight():
    x = np.random.default_rng(0).standard_normal((3, 2, 16)).astype(np.float32) * 50
    norm = RMSNorm(RMSNormSpec(eps=1e-5), 16, dtype=jnp.float32)
    norm.weight[...] = jnp.arange(16.0)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * np.arange(16)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5)


def test_eps_keeps_zeros_finite():
    norm = RMSNorm(RMSNormSpec(eps=1e-6), 8, dtype=jnp.float32)
    np.testing.assert_array_equal(norm(jnp.zeros((1, 8))), 0)


def test_large_bfloat16_activations_are_squared_in_float32():
    norm = RMSNorm(RMSNormSpec(eps=1e-6), 8, dtype=jnp.bfloat16)
    y = norm(jnp.full((1, 8), 1e30, jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    # The square of 1e30 is beyond float32, too: what fits is normalised, the rest must not be NaN.
    assert not jnp.isnan(y).any()
    np.testing.assert_array_equal(norm(jnp.full((1, 8), 1e15, jnp.bfloat16)), 1)


def test_an_offset_is_added_to_the_weight():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 8)), jnp.float32)
    plain, offset = (
        RMSNormSpec(eps=1e-5, offset=offset, rounds_first=False).make(8, dtype=jnp.float32)
        for offset in (0.0, 1.0)
    )
    plain.weight[...] = 1.5 + jnp.arange(8.0)
    offset.weight[...] = 0.5 + jnp.arange(8.0)
    np.testing.assert_array_equal(plain(x), offset(x))


def test_rounding_comes_before_the_weight_or_after_it():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 64)), jnp.bfloat16)
    early, late = (
        RMSNormSpec(eps=1e-6, rounds_first=first).make(64, dtype=jnp.bfloat16)
        for first in (True, False)
    )
    normal = RMSNormSpec(eps=1e-6, has_weight=False).make(64, dtype=jnp.float32)
    for norm in (early, late):
        norm.weight[...] = jnp.full(64, 1.3, jnp.bfloat16)
    exact, weight = normal(x.astype(jnp.float32)), jnp.bfloat16(1.3)
    np.testing.assert_array_equal(early(x), exact.astype(jnp.bfloat16) * weight)
    np.testing.assert_array_equal(late(x), (exact * weight.astype(jnp.float32)).astype(x.dtype))
    assert (early(x) != late(x)).any()


@pytest.mark.parametrize("has_weight", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm_has_a_mean_of_zero_and_a_variance_of_one(has_weight, has_bias):
    x = 5 + np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32) * 50
    spec = LayerNormSpec(eps=1e-5, has_weight=has_weight, has_bias=has_bias)
    norm = spec.make(16, dtype=jnp.float32)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    if has_weight:
        norm.weight[...] = jnp.arange(16.0)
        expected = expected * np.arange(16)
    if has_bias:
        norm.bias[...] = jnp.full(16, 0.25)
        expected = expected + 0.25
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)

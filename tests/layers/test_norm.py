"""RMS norm against its formula."""

import jax.numpy as jnp
import numpy as np

from jaxllm.layers.norm import RMSNorm, RMSNormSpec


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

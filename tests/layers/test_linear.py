"""Linear layers and their accumulation."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.dense.api import ROUNDED_XLA, XLA

from jaxllm.layers.linear import Linear


@pytest.mark.parametrize("bias", [False, True])
def test_weight_is_stored_out_by_in(bias):
    rng = np.random.default_rng(0)
    layer = Linear(5, 3, bias=bias, dtype=jnp.float32)
    weight, offset, x = (rng.standard_normal(s).astype(np.float32) for s in [(3, 5), 3, (2, 5)])
    layer.weight[...] = jnp.asarray(weight)
    if layer.bias is not None:
        layer.bias[...] = jnp.asarray(offset)
    expected = x @ weight.T + (offset if bias else 0)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, rtol=1e-5)


def test_bfloat16_is_summed_in_float32_and_rounded_once():
    # 4096 ones: a bfloat16 sum would get stuck at 256.
    layer = Linear(4096, 1, bias=True, dtype=jnp.bfloat16)
    layer.weight[...] = jnp.ones((1, 4096), jnp.bfloat16)
    layer.bias[...] = jnp.full(1, 20, jnp.bfloat16)
    y = layer(jnp.ones((1, 4096), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert float(y[0, 0]) == float(jnp.bfloat16(4116))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_product_that_rounds_is_the_same_sum(dtype):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal((n, 4096)), dtype) for n in (16, 24))
    y = ROUNDED_XLA(x, weight)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, y.astype(dtype).astype(jnp.float32))
    # The order in which is summed may differ, and so the last bit.
    exact = XLA(x, weight).astype(dtype).astype(jnp.float32)
    step = {"bfloat16": 2.0**-7, "float32": 1e-5}[dtype]
    np.testing.assert_allclose(y, exact, rtol=step, atol=1e-3)
    # 4096 ones: a bfloat16 sum would get stuck at 256.
    ones = jnp.ones((2, 4096), dtype)
    assert float(ROUNDED_XLA(ones, ones)[0, 0]) == 4096

"""Sums over the last axis, whose bits depend on nothing but their row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.row_sums import reference
from jaxllm_kernels.row_sums.native import NativeRowSums


@pytest.fixture
def native(any_library):
    return NativeRowSums.load(any_library)


def rows(dtype, *shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape) + 0.1, dtype)


# Parts of a vector, of four vectors, and more rows than one thread takes.
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("float32", (3, 5)),
        ("bfloat16", (2, 3, 67)),
        ("float16", (1, 4099)),
        ("bfloat16", (140, 1000)),
        ("float32", (0, 4)),
    ],
)
def test_sums_are_right(native, dtype, shape):
    x = rows(dtype, *shape)
    wide = np.asarray(x, np.float32)
    for op, expected in ((native.total, reference.total), (native.squares, reference.squares)):
        y = jax.jit(op)(x)
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, expected(wide), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_alone_has_the_bits_that_it_has_among_others(library, dtype):
    native = NativeRowSums.load(library)
    x = rows(dtype, 130, 1003)
    for op in (native.total, native.squares):
        among = np.asarray(jax.jit(op)(x))
        for first, last in ((0, 1), (129, 130), (3, 20)):
            np.testing.assert_array_equal(jax.jit(op)(x[first:last]), among[first:last])

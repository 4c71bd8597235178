"""Products of each head's rows with a matrix of that head: XLA's and our own for CPUs, against
float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.head_products import reference
from jaxllm_kernels.head_products.native import NativeHeadProducts
from jaxllm_kernels.head_products.xla import XLA_HEADS

# Results are rounded once.
BOUNDS = {"float32": 1e-6, "bfloat16": 3e-3}


@pytest.fixture
def native(any_library):
    return NativeHeadProducts.load(any_library)


def operands(num_rows, num_heads, num_inputs, num_outputs, dtype):
    """Rows, and a matrix of each head with its transpose."""
    rng = np.random.default_rng(num_rows)
    x = jnp.asarray(rng.normal(size=(num_rows, num_heads, num_inputs)), dtype)
    weight = jnp.asarray(rng.normal(size=(num_heads, num_inputs, num_outputs)), dtype)
    return x, weight, weight.swapaxes(1, 2)


def check(products, x, weight, transposed):
    expected = reference.times(np.asarray(x), np.asarray(weight))
    for op, matrices in ((products.times, weight), (products.times_transposed, transposed)):
        y = jax.jit(op)(x, matrices)
        assert y.dtype == x.dtype and y.shape == expected.shape
        difference = np.asarray(y, np.float64) - expected
        assert np.linalg.norm(difference) <= BOUNDS[x.dtype.name] * np.linalg.norm(expected)


def test_the_reference_of_a_transpose_is_that_of_the_matrix():
    x, weight, transposed = map(np.asarray, operands(3, 2, 5, 7, "float32"))
    np.testing.assert_allclose(
        reference.times(x, weight), reference.times_transposed(x, transposed), rtol=1e-12
    )


# Blocks of rows and what is left of them, parts of vectors, more rows than a thread takes.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_rows", "num_heads", "num_inputs", "num_outputs"),
    [(1, 3, 128, 512), (15, 2, 40, 72), (2, 5, 7, 33), (300, 1, 32, 64)],
)
def test_native_products_are_right(native, num_rows, num_heads, num_inputs, num_outputs, dtype):
    check(native, *operands(num_rows, num_heads, num_inputs, num_outputs, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_xlas_products_are_right(num_rows, dtype):
    check(XLA_HEADS, *operands(num_rows, 4, 32, 48, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_alone_has_the_bits_that_it_has_among_others(native, dtype):
    x, weight, transposed = operands(141, 3, 96, 160, dtype)
    for op, matrices in ((native.times, weight), (native.times_transposed, transposed)):
        among = np.asarray(jax.jit(op)(x, matrices))
        for first, last in ((0, 1), (140, 141), (4, 6), (3, 12), (20, 70)):
            alone = np.asarray(jax.jit(op)(x[first:last], matrices))
            np.testing.assert_array_equal(alone, among[first:last])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_zeros_at_the_end_are_zeros(native, dtype):
    x, weight, transposed = operands(9, 2, 32, 64, dtype)
    x = x.at[2].set(0).at[5:].set(-0.0)
    for op, matrices in ((native.times, weight), (native.times_transposed, transposed)):
        y = np.asarray(jax.jit(op)(x, matrices))
        np.testing.assert_array_equal(y[:5], jax.jit(op)(x[:5], matrices))
        np.testing.assert_array_equal(y[5:], np.zeros_like(y[5:]))

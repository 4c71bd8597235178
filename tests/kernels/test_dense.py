"""Products with weights: XLA's and our own for CPUs, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.dense.api import XLA, XLA_SCALED
from jaxllm_kernels.dense.native import (
    MAX_ROWS,
    MAX_ROWS_BESIDE_AMX,
    NativeMatmul,
    NativeScaledMatmul,
)
from jaxllm_kernels.dense.xla import XlaScaledMatmul


@pytest.fixture(scope="module")
def matmul(any_library):
    with pytest.MonkeyPatch.context() as patch:
        # With AMX it would leave many rows to XLA.
        patch.setattr("jaxllm_kernels.dense.native.processor", lambda: "flags : fma")
        yield NativeMatmul(any_library)


def operands(num_rows, num_outputs, num_inputs, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((num_rows, num_inputs)), dtype)
    return x, jnp.asarray(rng.standard_normal((num_outputs, num_inputs)), dtype)


def relative_error(y, x, weight):
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    return np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 7, 16, 32, 64, 128])
@pytest.mark.parametrize("num_outputs", [1, 5, 32, 131])
def test_native_products_are_exact_to_float32(matmul, num_rows, num_outputs, dtype):
    x, weight = operands(num_rows, num_outputs, 96, dtype)
    y = jax.jit(matmul)(x, weight)
    assert y.dtype == jnp.float32 and y.shape == (num_rows, num_outputs)
    assert relative_error(y, x, weight) < 1e-6
    assert relative_error(XLA(x, weight), x, weight) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_inputs", [32, 992, 1568, 2816, 4096])
@pytest.mark.parametrize("num_rows", [3, 130, 250])
def test_any_number_of_pieces_and_panels_is_exact(matmul, num_rows, num_inputs, dtype):
    x, weight = operands(num_rows, 37, num_inputs, dtype)
    assert relative_error(jax.jit(matmul)(x, weight), x, weight) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_rows_of_zeros_at_the_end_are_not_multiplied(matmul, dtype, zero):
    x, weight = operands(7, 70, 64, dtype)
    x = x.at[2].set(0).at[5:].set(zero)
    y = np.asarray(jax.jit(matmul)(x, weight))
    np.testing.assert_array_equal(y[:5], jax.jit(matmul)(x[:5], weight))
    np.testing.assert_array_equal(y[5:], np.zeros((2, 70)))
    # Any row that is multiplied by these would tell.
    y = np.asarray(jax.jit(matmul)(x, jnp.full_like(weight, jnp.nan)))
    assert np.isnan(y[:5]).all() and (y[5:] == 0).all()
    assert (jax.jit(matmul)(jnp.full_like(x, zero), weight * jnp.nan) == 0).all()


@pytest.mark.parametrize("num_rows", [320, 500, 512])
def test_many_panels_of_rows_are_exact(matmul, num_rows):
    x, weight = operands(num_rows, 131, 1120, jnp.bfloat16)
    assert relative_error(jax.jit(matmul)(x, weight), x, weight) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_rows, num_inputs", [(23, 256), (250, 2816)])
def test_a_row_is_the_same_alone_and_among_others(matmul, num_rows, num_inputs, dtype):
    x, weight = operands(num_rows, 70, num_inputs, dtype)
    multiply = jax.jit(matmul)
    together = np.asarray(multiply(x, weight))
    for row in {*range(0, num_rows, 7), num_rows - 1}:
        np.testing.assert_array_equal(multiply(x[row : row + 1], weight)[0], together[row])


@pytest.mark.parametrize(
    "num_rows, num_inputs, dtype, is_native",
    [
        (4, 64, jnp.bfloat16, True),
        (MAX_ROWS["bfloat16"] + 1, 64, jnp.bfloat16, False),
        (MAX_ROWS["float32"] + 1, 64, jnp.float32, False),
        (4, 72, jnp.bfloat16, False),
        (4, 64, jnp.float16, False),
    ],
)
def test_what_it_is_not_made_for_goes_to_xla(matmul, num_rows, num_inputs, dtype, is_native):
    x, weight = operands(num_rows, 8, num_inputs, dtype)
    text = jax.jit(matmul).lower(x, weight).as_text()
    assert ("jaxllm_dense" in text) == is_native and ("dot_general" in text) != is_native
    assert relative_error(matmul(x, weight), x, weight) < 1e-6


def test_a_processor_with_amx_leaves_many_rows_to_xla(matmul, monkeypatch):
    monkeypatch.setattr("jaxllm_kernels.dense.native.processor", lambda: "flags : fma amx_bf16")
    assert matmul.max_rows(jnp.bfloat16) == MAX_ROWS_BESIDE_AMX
    assert matmul.max_rows(jnp.float32) == MAX_ROWS["float32"]


def test_many_products_at_once_do_not_wait_for_each_other(matmul):
    """More of them than threads, each of many tiles, with nothing between them."""
    x, weight = operands(4, 4096, 128, jnp.bfloat16)
    weights = [weight + i for i in range(40)]
    together = jax.jit(lambda x, ws: [matmul(x, w) for w in ws])(x, weights)
    for one, w in zip(together, weights, strict=True):
        np.testing.assert_array_equal(one, matmul(x, w))


def test_leading_axes_are_kept(matmul):
    x, weight = operands(6, 8, 64, jnp.float32)
    y = matmul(x.reshape(2, 3, 64), weight)
    np.testing.assert_array_equal(y.reshape(6, 8), matmul(x, weight))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_of_no_rows_there_are_no_products(matmul, shape):
    x, weight = jnp.ones(shape), jnp.ones((8, 64))
    assert jax.jit(matmul)(x, weight).shape == XLA(x, weight).shape == (*shape[:-1], 8)


CODES = {"int8": jnp.int8, "float8": jnp.float8_e4m3fn}


def coded_operands(num_rows, num_outputs, num_inputs, dtype, code_type, groups, seed=0):
    """All codes but those of NaN, and scales of any size."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 256, (num_outputs, num_inputs), np.uint8)
    bits[bits & 0x7F == 0x7F] = 0
    codes = jax.lax.bitcast_convert_type(jnp.asarray(bits), code_type)
    scales = rng.uniform(0.5, 2, (num_outputs, groups)) * 10.0 ** rng.integers(-4, 4)
    x = jnp.asarray(rng.standard_normal((num_rows, num_inputs)), dtype)
    return x, codes, jnp.asarray(scales, jnp.float32)


def weights(codes, scales):
    each = codes.shape[1] // scales.shape[1]
    values = np.asarray(codes.astype(jnp.float32), np.float64)
    return values * np.repeat(np.asarray(scales, np.float64), each, axis=1)


@pytest.mark.parametrize("code_type", CODES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "num_rows, num_outputs, num_inputs, groups",
    [(1, 9, 96, 1), (3, 70, 96, 3), (7, 131, 4096, 1), (130, 37, 256, 2), (600, 5, 64, 1)],
)
def test_products_with_codes_are_exact_to_float32(
    any_library, num_rows, num_outputs, num_inputs, groups, dtype, code_type
):
    operands = coded_operands(num_rows, num_outputs, num_inputs, dtype, CODES[code_type], groups)
    multiply = jax.jit(NativeScaledMatmul(any_library))
    assert "jaxllm_dense" in multiply.lower(*operands).as_text()
    for y in (multiply(*operands), XLA_SCALED(*operands)):
        assert y.dtype == jnp.float32 and y.shape == (num_rows, num_outputs)
        assert relative_error(y, operands[0], weights(*operands[1:])) < 1e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_times_codes_is_the_same_alone_and_among_others(any_library, dtype):
    x, codes, scales = coded_operands(23, 70, 256, dtype, jnp.int8, 2)
    multiply = jax.jit(NativeScaledMatmul(any_library))
    together = np.asarray(multiply(x, codes, scales))
    for row in (0, 5, 22):
        np.testing.assert_array_equal(multiply(x[row : row + 1], codes, scales)[0], together[row])


def test_groups_that_are_no_whole_vectors_are_left_to_xla(any_library):
    operands = coded_operands(3, 5, 48, jnp.float32, jnp.int8, 3)
    multiply = jax.jit(NativeScaledMatmul(any_library))
    assert "jaxllm_dense" not in multiply.lower(*operands).as_text()
    assert relative_error(multiply(*operands), operands[0], weights(*operands[1:])) < 1e-6


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_xla_multiplies_the_groups_of_all_devices_at_a_time(shards):
    operands = coded_operands(3, 5, 96, jnp.float32, jnp.int8, 6)
    y = XlaScaledMatmul(shards)(*operands)
    assert relative_error(y, operands[0], weights(*operands[1:])) < 1e-6

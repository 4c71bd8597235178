"""Products with weights: XLA's and our own for CPUs, against float64."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jaxllm_kernels.coded import (
    IN_ORDER,
    TABLES,
    CodedWeight,
    CodeForm,
    NibbleOrder,
    pack,
    unpack,
    values,
    widen,
)
from jaxllm_kernels.coded_cases import FORMS, random_weight
from jaxllm_kernels.dense.api import XLA, XLA_CODED
from jaxllm_kernels.dense.native import (
    MAX_ROWS,
    MAX_ROWS_BESIDE_AMX,
    NativeCodedMatmul,
    NativeMatmul,
)
from jaxllm_kernels.dense.xla import XlaCodedMatmul


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


# Always every second of them.
@pytest.mark.parametrize(
    ("num_outputs", "num_rows", "dtype"),
    [
        pytest.param(outputs, rows, dtype, marks=[pytest.mark.sweep] * ((i + j + k) % 2))
        for i, outputs in enumerate((1, 5, 32, 131))
        for j, rows in enumerate((1, 2, 3, 4, 7, 16, 32, 64, 128))
        for k, dtype in enumerate((jnp.float32, jnp.bfloat16))
    ],
)
def test_native_products_are_exact_to_float32(matmul, num_rows, num_outputs, dtype):
    x, weight = operands(num_rows, num_outputs, 96, dtype)
    y = jax.jit(matmul)(x, weight)
    assert y.dtype == jnp.float32 and y.shape == (num_rows, num_outputs)
    assert relative_error(y, x, weight) < 1e-6
    assert relative_error(XLA(x, weight), x, weight) < 1e-6


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "dtype"),
    [
        pytest.param(rows, inputs, dtype, marks=[pytest.mark.sweep] * ((i + j + k) % 2))
        for i, rows in enumerate((3, 130, 250))
        for j, inputs in enumerate((32, 992, 1568, 2816, 4096))
        for k, dtype in enumerate((jnp.float32, jnp.bfloat16))
    ],
)
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_repeated", [1, 4, 7])
def test_rows_that_repeat_the_one_before_have_its_result(matmul, dtype, num_repeated):
    x, weight = operands(7, 70, 64, dtype)
    y = np.asarray(jax.jit(matmul)(x, weight))
    distinct = np.minimum(np.arange(7), 7 - num_repeated)
    np.testing.assert_array_equal(jax.jit(matmul)(x[distinct], weight), y[distinct])


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


def coded_operands(num_rows, shape, form, dtype, seed=0):
    random = np.random.default_rng(seed)
    x = jnp.asarray(random.standard_normal((num_rows, shape[1])), dtype)
    return x, random_weight(random, shape, form, size=10.0 ** random.integers(-4, 4))


IN_16_BITS = ("int8", "float8, groups", "int4, groups, offsets", "mxfp4")


@pytest.mark.parametrize("most", [1 << 21, 37 * 256], ids=["whole", "pieces"])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [(form, jnp.float32) for form in FORMS] + [(form, jnp.bfloat16) for form in IN_16_BITS],
)
def test_xla_multiplies_by_codes_of_every_form(form, dtype, most, monkeypatch):
    monkeypatch.setattr("jaxllm_kernels.dense.xla._MOST_ELEMENTS", most)
    x, weight = coded_operands(5, (37, 1024), FORMS[form], dtype)
    multiply = XlaCodedMatmul(widens_in_place=most > 37 * 1024)
    assert multiply.held(weight.form, 37, 1024) == weight.form
    y = jax.jit(multiply)(x, weight)
    assert y.dtype == jnp.float32 and y.shape == (5, 37)
    assert relative_error(y, x, values(weight)) < 1e-6


@pytest.mark.parametrize("group", [None, 32, 1024])
@pytest.mark.parametrize("order", [NibbleOrder(per_word=4, stride=32), NibbleOrder(stride=16)])
def test_codes_may_be_in_any_order(order, group):
    form = CodeForm(codes="int4", group=group, order=order, has_offsets=True)
    x, weight = coded_operands(3, (5, 2048), form, jnp.float32)
    assert relative_error(jax.jit(XLA_CODED)(x, weight), x, values(weight)) < 1e-6
    plain = replace(form, order=IN_ORDER)
    repacked = pack(unpack(weight.codes, order), IN_ORDER)
    same = replace(weight, codes=repacked, form=plain)
    np.testing.assert_array_equal(values(weight), values(same))


def test_the_bits_of_codes_in_an_order():
    numbers = np.arange(128, dtype=np.uint8) % 16
    in_order = pack(numbers, IN_ORDER)
    assert in_order[:3].tolist() == [0x10, 0x32, 0x54]
    words = pack(numbers // 2 % 16, NibbleOrder(per_word=4, stride=32)).view("<u2")
    numbers = numbers // 2 % 16
    for lane in range(32):
        its = [int(words[lane]) >> 4 * j & 15 for j in range(4)]
        assert its == numbers[lane::32].tolist()
    # As GGUF's Q4_0 has them.
    halves = pack(numbers[:32], NibbleOrder(stride=16))
    np.testing.assert_array_equal(halves & 15, numbers[:16])
    np.testing.assert_array_equal(halves >> 4, numbers[16:32])


@pytest.mark.parametrize("name", TABLES)
def test_values_of_codes_are_those_of_their_types(name):
    codes = jnp.arange(16, dtype=jnp.uint8)
    form = CodeForm(codes=name)
    wide = widen(pack(codes, IN_ORDER), form, jnp.float32)
    np.testing.assert_array_equal(wide, np.float32(TABLES[name]))
    if name != "nf4":
        np.testing.assert_array_equal(widen(pack(codes, IN_ORDER), form, jnp.bfloat16), wide)
    if name == "float4_e2m1fn":
        numbers = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
        np.testing.assert_array_equal(np.float32(TABLES[name]), numbers.astype(np.float32))


@pytest.mark.parametrize("form", ["int8", "float8, groups", "int4, groups, offsets"])
@pytest.mark.parametrize("rows", [1, 64])
def test_xla_makes_no_copy_of_a_weight_in_more_bits(rows, form):
    shape = (4096, 8192)
    x = jax.ShapeDtypeStruct((rows, shape[1]), jnp.bfloat16)
    weight = jax.eval_shape(
        lambda: CodedWeight(
            codes=jnp.zeros((shape[0], shape[1] * FORMS[form].bits // 8), FORMS[form].code_dtype),
            scales=jnp.zeros((shape[0], FORMS[form].num_groups(shape[1]))),
            offsets=jnp.zeros((shape[0], FORMS[form].num_groups(shape[1])))
            if FORMS[form].has_offsets
            else None,
            form=FORMS[form],
        )
    )
    compiled = jax.jit(XlaCodedMatmul(widens_in_place=False)).lower(x, weight).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < shape[0] * shape[1] // 2


NATIVE_FORMS = {
    "int8": CodeForm(codes="int8"),
    "int8, groups of 16": CodeForm(codes="int8", group=16, scale_dtype="float16"),
    "int8, groups, offsets": CodeForm(codes="int8", group=32, has_offsets=True),
    "float8": CodeForm(codes="float8_e4m3fn"),
    "float8, groups": CodeForm(codes="float8_e4m3fn", group=128, scale_dtype="bfloat16"),
    "int4, groups": CodeForm(codes="int4", group=128),
    "int4, offsets": CodeForm(codes="int4", has_offsets=True),
    "int4, groups, offsets": CodeForm(codes="int4", group=32, has_offsets=True),
    "mxfp4": CodeForm(codes="float4_e2m1fn", group=32, scale_dtype="float8_e8m0fnu"),
    "nvfp4": CodeForm(codes="float4_e2m1fn", group=16),
}
# Of the norm: rows of bfloat16 become whole numbers that share a power of two.
CODED_TOLERANCES = {"float32": 1e-6, "bfloat16": 1e-5}


def held_operands(native, num_rows, shape, form, dtype):
    held = native.held(form, *shape)
    assert held.scale_dtype == "float32"
    return coded_operands(num_rows, shape, held, dtype)


# These have all types of codes, with groups and offsets.
IN_32_BITS = ("int8, groups of 16", "float8, groups", "int4, groups, offsets", "mxfp4")


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        pytest.param(
            dtype,
            form,
            marks=[pytest.mark.sweep] * (dtype == jnp.float32 and form not in IN_32_BITS),
        )
        for dtype in (jnp.float32, jnp.bfloat16)
        for form in NATIVE_FORMS
    ],
)
def test_products_with_codes_are_right(library_for_codes, dtype, form):
    if jnp.dtype(dtype).name not in library_for_codes.dtypes:
        pytest.skip("this build is for 16 bits")
    native = NativeCodedMatmul(library_for_codes)
    odd = [(3, 70, 96), (5, 1, 1184)] if NATIVE_FORMS[form].bits == 8 else []
    odd = [size for size in odd if size[2] % (NATIVE_FORMS[form].group or 1) == 0]
    for num_rows, *shape in [(1, 9, 256), (2, 131, 4096), (7, 37, 2816), (130, 6, 256), *odd]:
        x, weight = held_operands(native, num_rows, tuple(shape), NATIVE_FORMS[form], dtype)
        y = jax.jit(native)(x, weight)
        assert y.dtype == jnp.float32 and y.shape == (num_rows, shape[0])
        error = relative_error(y, x, values(weight))
        assert error < CODED_TOLERANCES[x.dtype.name], (num_rows, shape, error)


@pytest.mark.parametrize("form", ["int8", "int4, groups, offsets", "float8, groups"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_inputs", [256, 4096])
def test_a_row_times_codes_is_the_same_alone_and_among_others(library, dtype, form, num_inputs):
    native = NativeCodedMatmul(library)
    x, weight = held_operands(native, 150, (23, num_inputs), NATIVE_FORMS[form], dtype)
    multiply = jax.jit(native)
    together = np.asarray(multiply(x, weight))
    for row in (0, 5, 149):
        np.testing.assert_array_equal(multiply(x[row : row + 1], weight)[0], together[row])


def test_rows_whose_numbers_differ_widely_lose_little(library):
    """The error of an input is at most 2^-15 of the largest one of its part, as README.md says."""
    native, form = NativeCodedMatmul(library), CodeForm(codes="int8", group=32)
    x, weight = held_operands(native, 4, (64, 512), form, jnp.bfloat16)
    x = x * (10.0 ** np.random.default_rng(1).uniform(-6, 6, x.shape)).astype(x.dtype)
    y = np.asarray(jax.jit(native)(x, weight), np.float64)
    wide, weights = np.asarray(x, np.float64), np.asarray(values(weight), np.float64)
    largest = np.repeat(np.abs(wide).reshape(4, -1, 32).max(-1), 32, axis=-1)
    sums = 1e-6 * np.abs(wide) @ np.abs(weights).T
    assert (np.abs(y - wide @ weights.T) <= 2.0**-15 * largest @ np.abs(weights).T + sums).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_what_is_not_a_number_stays_with_its_row(library, dtype, spoilt):
    native = NativeCodedMatmul(library)
    x, weight = held_operands(native, 5, (9, 256), CodeForm(codes="int8", group=128), dtype)
    y = np.asarray(jax.jit(native)(x.at[2, 200].set(spoilt), weight))
    assert not np.isfinite(y[2]).any()
    others = np.arange(5) != 2
    np.testing.assert_array_equal(y[others], jax.jit(native)(x, weight)[others])


def test_rows_of_zeros_times_codes_are_not_multiplied(library):
    native = NativeCodedMatmul(library)
    x, weight = held_operands(native, 7, (9, 256), CodeForm(codes="int8"), jnp.bfloat16)
    spoilt = replace(weight, scales=weight.scales * jnp.nan)
    y = np.asarray(jax.jit(native)(x.at[5:].set(0), spoilt))
    assert np.isnan(y[:5]).all() and (y[5:] == 0).all()


@pytest.mark.parametrize(
    ("form", "num_inputs", "reason"),
    [
        (CodeForm(codes="int8"), 48, "the 48 inputs on a device are no multiple of 32"),
        (CodeForm(codes="int4", group=32), 96, "the 96 inputs on a device are no multiple of 128"),
        (CodeForm(codes="int8", group=48), 96, "groups of 48 inputs are no power of two"),
        (CodeForm(codes="int8", group=8), 96, "groups of 8 inputs are no power of two from 16 on"),
        (CodeForm(codes="nf4", group=32), 128, "codes of type nf4 are not int8"),
    ],
)
def test_codes_that_the_native_kernel_does_not_take_are_refused(library, form, num_inputs, reason):
    with pytest.raises(ValueError, match=reason):
        NativeCodedMatmul(library).held(form, 8, num_inputs)

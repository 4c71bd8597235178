"""The experts of a layer: each implementation against float64, and what does not change a token."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.coded_cases import FORMS
from jaxllm_kernels.experts.cases import CASES, operands, run_case
from jaxllm_kernels.experts.native import NativeExperts
from jaxllm_kernels.experts.reference import ReferenceExperts
from jaxllm_kernels.experts.xla import XLA_EXPERTS

from tests.kernels.conftest import OTHER_PROCESSORS

OPS = ("reference", "xla", "native")
DTYPES = ("float32", "bfloat16")


@pytest.fixture(scope="module", params=OPS)
def op(request):
    if request.param == "native":
        return NativeExperts(request.getfixturevalue("library"))
    return {"reference": ReferenceExperts(), "xla": XLA_EXPERTS}[request.param]


@functools.partial(jax.jit, static_argnames=("op", "config"))
def call(x, chosen, factors, weights, op, config):
    return op(x, chosen, factors, weights, config=config)


def run(op, case, x, chosen, factors, weights):
    return np.asarray(call(x, chosen, factors, weights, op, case.config))


def swept(names, spared):
    return [
        pytest.param(name, marks=[pytest.mark.sweep] if name in spared else []) for name in names
    ]


# The others have all that these have.
@pytest.mark.parametrize("name", swept(CASES, {"even", "all experts", "one choice", "wide"}))
def test_cases(op, name):
    run_case(op, CASES[name], "float32")


@pytest.mark.parametrize("name", CASES)
def test_native_cases_in_16_bits(library, name):
    run_case(NativeExperts(library), CASES[name], "bfloat16")


@pytest.mark.parametrize("op", [ReferenceExperts(), XLA_EXPERTS], ids=lambda op: op.name)
@pytest.mark.parametrize("name", ["few tokens", "clamped, with biases"])
def test_other_forms_in_16_bits(op, name):
    run_case(op, CASES[name], "bfloat16")


# XLA multiplies by these as by the others; test_dense.py has all.
_AS_OTHER_FORMS = {"int8, groups of 16", "float8", "int4", "int4, offsets", "nvfp4"}


@pytest.mark.parametrize("form", swept(FORMS, _AS_OTHER_FORMS))
def test_cases_with_codes(form):
    run_case(XLA_EXPERTS, CASES["clamped, with biases"], "float32", FORMS[form])


@pytest.mark.parametrize(
    "op",
    [pytest.param(ReferenceExperts(), marks=pytest.mark.sweep), XLA_EXPERTS],
    ids=lambda op: op.name,
)
@pytest.mark.parametrize("form", ["float8, groups", "mxfp4"])
def test_codes_in_16_bits(op, form):
    run_case(op, CASES["few tokens"], "bfloat16", FORMS[form])


# This one's code has all cases above.
@pytest.mark.parametrize(
    ("any_library", "name", "dtype"),
    [
        pytest.param(
            processor,
            name,
            dtype,
            # Of the two with AVX each has each name, and each type.
            marks=[pytest.mark.sweep] * (processor == "x86-64" or (i + j + k) % 2),
        )
        for i, processor in enumerate(OTHER_PROCESSORS)
        for j, name in enumerate(("wide", "clamped, with biases"))
        for k, dtype in enumerate(DTYPES)
    ],
    indirect=["any_library"],
)
def test_cases_on_other_processors(any_library, name, dtype):
    run_case(NativeExperts(any_library), CASES[name], dtype)


# XLA's products of few rows differ from those of many.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["one expert has all tokens, one has none", "wide"])
def test_a_token_is_the_same_alone_and_among_others(library, name, dtype):
    case, op = CASES[name], NativeExperts(library)
    x, chosen, factors, weights = operands(case, dtype)
    together = run(op, case, x, chosen, factors, weights)
    for token in {0, 1, case.num_tokens // 2, case.num_tokens - 1}:
        one = slice(token, token + 1)
        alone = run(op, case, x[one], chosen[one], factors[one], weights)
        np.testing.assert_array_equal(alone[0], together[token])


def test_the_order_of_choices_does_not_matter(op):
    case = CASES["even"]
    x, chosen, factors, weights = operands(case, "float32")
    y = run(op, case, x, chosen, factors, weights)
    np.testing.assert_array_equal(run(op, case, x, chosen[:, ::-1], factors[:, ::-1], weights), y)


def test_an_expert_without_tokens_is_not_read(op):
    case = CASES["one expert has all tokens, one has none"]
    x, chosen, factors, weights = operands(case, "float32")
    unused = case.num_experts - 1
    assert not (chosen == unused).any()
    spoilt = jax.tree.map(lambda array: array.at[unused].set(jnp.nan), weights)
    y = run(op, case, x, chosen, factors, weights)
    np.testing.assert_array_equal(run(op, case, x, chosen, factors, spoilt), y)


def test_what_is_not_a_number_stays_with_its_token(op):
    case = CASES["even"]
    x, chosen, factors, weights = operands(case, "float32")
    y = run(op, case, x, chosen, factors, weights)
    spoilt = run(op, case, x.at[3].set(jnp.nan), chosen, factors, weights)
    assert np.isnan(spoilt[3]).all()
    others = np.arange(case.num_tokens) != 3
    np.testing.assert_array_equal(spoilt[others], y[others])


# Sizes that are multiples of a chunk of codes.
WHOLE_CHUNKS = replace(CASES["few tokens"], size=256, hidden_size=384)


# Always half of them, which have each pair.
@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        pytest.param(name, form, dtype, marks=[pytest.mark.sweep] * ((i + j + k) % 2))
        for i, name in enumerate(
            ("even", "clamped, with biases", "scaled inputs", "wide", "without gates")
        )
        for j, form in enumerate(("int8, groups, offsets", "int8, groups of 16"))
        for k, dtype in enumerate(DTYPES)
    ],
)
def test_native_cases_with_codes_of_8_bits(library, name, form, dtype):
    run_case(NativeExperts(library), CASES[name], dtype, FORMS[form])


@pytest.mark.parametrize("num_tokens", [1, 9, 70])
@pytest.mark.parametrize("form", ["int4, groups, offsets", "int4"])
def test_native_cases_with_codes_of_4_bits(library, form, num_tokens):
    for dtype in DTYPES:
        case = replace(WHOLE_CHUNKS, num_tokens=num_tokens)
        run_case(NativeExperts(library), case, dtype, FORMS[form])


def test_a_token_times_codes_is_the_same_alone_and_among_others(library):
    op, case = NativeExperts(library), replace(WHOLE_CHUNKS, num_tokens=40)
    held = op.held(FORMS["int4, groups, offsets"], case.size, case.hidden_size)
    x, chosen, factors, weights = operands(case, "bfloat16", form=held)
    together = run(op, case, x, chosen, factors, weights)
    for token in (0, 17, 39):
        one = slice(token, token + 1)
        alone = run(op, case, x[one], chosen[one], factors[one], weights)
        np.testing.assert_array_equal(alone[0], together[token])


@pytest.mark.parametrize("form", ["int8, groups, offsets", "mxfp4"])
def test_codes_of_an_expert_without_tokens_are_not_read(form):
    case = CASES["one expert has all tokens, one has none"]
    x, chosen, factors, weights = operands(case, "float32", form=FORMS[form])
    y = run(XLA_EXPERTS, case, x, chosen, factors, weights)
    is_scale = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
    spoilt = jax.tree.map(
        lambda leaf: leaf.at[case.num_experts - 1].set(jnp.nan) if is_scale(leaf) else leaf, weights
    )
    np.testing.assert_array_equal(run(XLA_EXPERTS, case, x, chosen, factors, spoilt), y)


@pytest.mark.parametrize("num_tokens", [1, 16, 128])
def test_xla_copies_no_more_than_an_expert(num_tokens):
    experts, size, hidden = 64, 256, 256
    x = jax.ShapeDtypeStruct((num_tokens, hidden), jnp.bfloat16)
    chosen = jax.ShapeDtypeStruct((num_tokens, 4), jnp.int32)
    factors = jax.ShapeDtypeStruct((num_tokens, 4), jnp.float32)
    case = CASES["even"]
    weights = type(operands(case, "float32")[3])(
        jax.ShapeDtypeStruct((experts, 2, size, hidden), jnp.bfloat16),
        jax.ShapeDtypeStruct((experts, hidden, size), jnp.bfloat16),
    )
    call = jax.jit(lambda *operands: XLA_EXPERTS(*operands, config=case.config))
    compiled = call.lower(x, chosen, factors, weights).compile()
    of_expert = 3 * size * hidden * 2
    temporary = compiled.memory_analysis().temp_size_in_bytes
    # In 16 bits and widened to 32, beside some rows of activations.
    assert temporary < 5 * of_expert + 16 * num_tokens * hidden * 4, temporary


def test_sizes_that_the_native_kernel_does_not_have_are_refused(library):
    native = NativeExperts(library)
    native.check(64, 96, "bfloat16")
    with pytest.raises(ValueError, match="size of an expert on a device, 48, is not a multiple"):
        native.check(48, 96, "bfloat16")
    with pytest.raises(ValueError, match="hidden_size on a device, 90, is not a multiple of 32"):
        native.check(64, 90, "bfloat16")
    with pytest.raises(ValueError, match="dtype='float16' is not one of"):
        native.check(64, 96, "float16")

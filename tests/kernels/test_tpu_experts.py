"""The experts on TPUs, emulated on a CPU: results, races, and what does not change a token.

JAX's TPU interpreter starts memory as NaN, and checks every access for bounds and for races.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jaxllm_kernels.coded import CodeForm
from jaxllm_kernels.coded_cases import FORMS
from jaxllm_kernels.experts.api import ExpertsConfig
from jaxllm_kernels.experts.cases import CASES, CLAMPED, Case, operands, run_case
from jaxllm_kernels.experts.tpu import TpuExperts, Tuning

FEW = TpuExperts(chip="v6e", interpret=True)
# Several items of an expert, tiles of an item, and, for a few cases, calls.
MANY = dataclasses.replace(
    FEW,
    tuning=Tuning(few_tokens=0, block_bytes=1 << 22, call_tokens=64, item_rows=32, tile_rows=16),
)
OPS = pytest.mark.parametrize("op", [FEW, MANY], ids=["few", "many"])

# An expert has several blocks of each kind, the last of which are shorter.
BLOCK_BYTES = 500_000
CUT_CASES = {
    # XLA would keep the down projections of the first with their outputs last, and the gate and up
    # projections of the second.
    "wide": CASES["wide"],
    # Of Nemotron 3 Nano, a quarter: an odd number of halves of the lanes.
    "without gates": Case(
        num_tokens=5,
        num_choices=2,
        num_experts=3,
        size=464,
        hidden_size=672,
        config=ExpertsConfig(is_gated=False),
    ),
    "turned": Case(
        num_tokens=5,
        num_choices=2,
        num_experts=3,
        size=576,
        hidden_size=320,
        config=CLAMPED,
        has_bias=True,
    ),
}


def assert_no_races() -> None:
    # Where the interpreter keeps its findings; there is no public name.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    assert races is not None and not races.races_found


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


@functools.partial(jax.jit, static_argnames=("op", "config"))
def call(x, chosen, factors, weights, op, config):
    return op(x, chosen, factors, weights, config=config)


def run(op, case, x, chosen, factors, weights):
    return np.asarray(call(x, chosen, factors, weights, op, case.config))


# Emulating each case takes seconds. These are for other implementations, or others cover them, or
# they are computed in 16 bits.
SPARED = {"even", "one choice", "all experts", "clamped without offset", "wide"}
SPARED |= {"scaled inputs"}
# These have what one kernel does like the other.
SPARED_OF_MANY = SPARED | {"gelu", "few tokens"}


@pytest.mark.parametrize(
    ("op", "name"),
    [
        pytest.param(op, name, id=f"{name}-{kind}", marks=[pytest.mark.sweep] * (name in spared))
        for op, kind, spared in ((FEW, "few", SPARED), (MANY, "many", SPARED_OF_MANY))
        for name in CASES
    ],
)
def test_cases(op, name):
    case = CASES[name]
    if case.num_tokens > 100:  # as few as take two calls
        case = dataclasses.replace(case, num_tokens=80)
    run_case(op, case, "float32")
    assert_no_races()


@OPS
@pytest.mark.parametrize(
    "name",
    ["few tokens", "scaled inputs", pytest.param("clamped, with biases", marks=pytest.mark.sweep)],
)
def test_cases_in_16_bits(op, name):
    run_case(op, CASES[name], "bfloat16")
    assert_no_races()


@pytest.mark.parametrize(
    ("name", "dtype", "few"),
    [
        ("wide", "bfloat16", True),
        ("turned", "float32", True),
        ("without gates", "bfloat16", True),
        ("without gates", "float32", False),
        pytest.param("wide", "float32", False, marks=pytest.mark.sweep),
        ("turned", "bfloat16", False),
    ],
)
def test_blocks_of_an_expert(name, dtype, few):
    assert MANY.tuning is not None
    tuning = MANY.tuning._replace(few_tokens=64 if few else 0, block_bytes=BLOCK_BYTES)
    run_case(dataclasses.replace(MANY, tuning=tuning), CUT_CASES[name], dtype)
    assert_no_races()


BLOCKS_OF_CODES = CodeForm(codes="float8_e4m3fn", group=128)
CODED_CASES = {
    # DeepSeek's, with several groups of both matrices.
    "groups": (
        Case(num_tokens=9, num_choices=2, num_experts=3, size=256, hidden_size=384),
        BLOCKS_OF_CODES,
    ),
    # Inputs that are widened in several parts, and blocks of which the last are shorter.
    "wide": (CASES["wide"], FORMS["int8"]),
    "turned": (CUT_CASES["turned"], FORMS["float8"]),
    "scaled inputs": (CASES["scaled inputs"], FORMS["float8"]),
}


@pytest.mark.parametrize(
    ("name", "dtype", "few"),
    [
        ("groups", "bfloat16", True),
        ("groups", "float32", False),
        ("turned", "bfloat16", False),
        pytest.param("wide", "float32", True, marks=pytest.mark.sweep),
        pytest.param("wide", "bfloat16", False, marks=pytest.mark.sweep),
        pytest.param("turned", "float32", True, marks=pytest.mark.sweep),
        pytest.param("scaled inputs", "bfloat16", False, marks=pytest.mark.sweep),
    ],
)
def test_codes_of_8_bits(name, dtype, few):
    case, form = CODED_CASES[name]
    assert MANY.tuning is not None
    tuning = MANY.tuning._replace(few_tokens=64 if few else 0, block_bytes=BLOCK_BYTES)
    run_case(dataclasses.replace(MANY, tuning=tuning), case, dtype, form)
    assert_no_races()


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (FORMS["int4"], "by those of 8 bits without offsets"),
        (FORMS["int8, groups, offsets"], "by those of 8 bits without offsets"),
        (FORMS["int8, groups of 16"], "groups of 16 inputs are no multiple of 128"),
        (FORMS["mxfp4"], "by those of 8 bits without offsets"),
        (CodeForm(codes="int8", scale_dtype="float16"), "scales are float16"),
    ],
)
def test_codes_that_the_kernels_do_not_multiply_by_are_refused(form, why):
    with pytest.raises(ValueError, match=why):
        FEW.held(form, 256, 384)
    with pytest.raises(ValueError, match="not fewer than 128 groups of 128"):
        FEW.held(BLOCKS_OF_CODES, 256, 128 * 128)


def test_codes_of_4_bits_with_powers_of_two_are_held_as_float8():
    op = dataclasses.replace(FEW, mx_by_output=True)
    assert op.held(FORMS["mxfp4"], 256, 384) == CodeForm(codes="float8_e4m3fn")


@OPS
def test_a_token_does_not_depend_on_others_nor_on_the_order_of_choices(op):
    case = dataclasses.replace(CASES["even"], num_tokens=18)
    x, chosen, factors, weights = operands(case, "bfloat16")
    y = run(op, case, x, chosen, factors, weights)
    others = jnp.arange(case.num_tokens)[:, None] != 2
    without = jnp.where(others, case.num_experts, chosen)[:, ::-1]
    alone = run(op, case, jnp.where(others, jnp.nan, x), without, factors[:, ::-1], weights)
    np.testing.assert_array_equal(alone[2], y[2])
    assert not alone[np.arange(case.num_tokens) != 2].any()


@OPS
def test_an_expert_without_tokens_is_not_read(op):
    case = dataclasses.replace(CASES["one expert has all tokens, one has none"], num_tokens=20)
    x, chosen, factors, weights = operands(case, "float32")
    unused = case.num_experts - 1
    assert not (chosen == unused).any()
    y = run(op, case, x, chosen, factors, weights)
    spoilt = type(weights)(
        *(None if array is None else array.at[unused].set(jnp.nan) for array in weights)
    )
    np.testing.assert_array_equal(run(op, case, x, chosen, factors, spoilt), y)


@pytest.mark.parametrize(
    ("chip", "size", "dtype", "why"),
    [
        ("v6e", 1 << 20, "bfloat16", "take more on-chip memory than a kernel on v6e gets"),
        ("v6e", 768, "float16", "dtype='float16' is not bfloat16 or float32"),
        ("v99", 768, "bfloat16", "the chip 'v99' is not known"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(chip, size, dtype, why):
    with pytest.raises(ValueError, match=why):
        TpuExperts(chip=chip).check(
            num_experts=8,
            num_choices=2,
            num_tokens=2048,
            num_halves=2,
            size=size,
            hidden_size=4096,
            dtype=dtype,
        )

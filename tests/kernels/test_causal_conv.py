"""Short causal convolutions: every implementation computes every batch of every kind of filter."""

import dataclasses

import pytest
from jaxllm_kernels.causal_conv.cases import FILTERS, TOLERANCES, error
from jaxllm_kernels.causal_conv.native import NativeConv
from jaxllm_kernels.causal_conv.reference import ReferenceConv
from jaxllm_kernels.causal_conv.xla import XlaConv
from jaxllm_kernels.recurrent.cases import CASES

# What the kernel in C++ computes always: each kind of row, and more channels than a unit of work.
ALWAYS = [("drafts", "float32", "with a bias", 10), ("mixed", "bfloat16", "usual", 530)]
NATIVE = [
    *ALWAYS,
    *((name, dtype, "usual", 10) for name in CASES for dtype in TOLERANCES),
    *(("borders of tiles", "float32", filters, 270) for filters in FILTERS),
]


@pytest.mark.parametrize(
    ("name", "dtype", "filters", "channels"),
    [pytest.param(*it, marks=[] if it in ALWAYS else pytest.mark.sweep) for it in NATIVE],
)
def test_native_is_right(any_library, name, dtype, filters, channels):
    op = NativeConv.load(any_library, dtype)
    layer = dataclasses.replace(FILTERS[filters], num_channels=channels)
    assert error(op, name, layer, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize("name", CASES)
def test_xla_is_right(name):
    assert error(XlaConv(), name, FILTERS["usual"]) < TOLERANCES["float32"]


@pytest.mark.parametrize("filters", FILTERS)
def test_xla_is_right_for_other_filters(filters):
    assert error(XlaConv(), "borders of tiles", FILTERS[filters]) < TOLERANCES["float32"]


@pytest.mark.parametrize("name", ["mixed", "decodes"])
def test_xla_is_right_in_16_bits(name):
    assert error(XlaConv(), name, FILTERS["with a bias"], "bfloat16") < TOLERANCES["bfloat16"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference_is_right(dtype):
    assert error(ReferenceConv(), "mixed", FILTERS["with a bias"], dtype) < TOLERANCES[dtype]

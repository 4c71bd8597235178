"""Short causal convolutions: every implementation computes every batch of every kind of filter."""

import pytest
from jaxllm_kernels.causal_conv.cases import FILTERS, TOLERANCES, error
from jaxllm_kernels.causal_conv.reference import ReferenceConv
from jaxllm_kernels.causal_conv.xla import XlaConv
from jaxllm_kernels.recurrent.cases import CASES


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

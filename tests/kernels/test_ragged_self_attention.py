"""Self-attention over whole rows: every implementation computes every case."""

import pytest
from jaxllm_kernels.ragged_self_attention.cases import CASES, TOLERANCES, error
from jaxllm_kernels.ragged_self_attention.reference import ReferenceSelfAttention
from jaxllm_kernels.ragged_self_attention.xla import XlaSelfAttention


@pytest.mark.parametrize("name", CASES)
def test_xla_is_right(name):
    assert error(XlaSelfAttention(), CASES[name]) < TOLERANCES["float32"]


@pytest.mark.parametrize("name", ["longer than a tile", "a reach"])
def test_xla_is_right_in_16_bits_and_with_other_tiles(name):
    assert error(XlaSelfAttention(), CASES[name], "bfloat16") < TOLERANCES["bfloat16"]
    assert error(XlaSelfAttention(tile=16), CASES[name]) < TOLERANCES["float32"]


@pytest.mark.parametrize("name", ["longer than a tile", "grouped heads", "a reach"])
def test_reference_is_right(name):
    assert error(ReferenceSelfAttention(), CASES[name]) < TOLERANCES["float32"]

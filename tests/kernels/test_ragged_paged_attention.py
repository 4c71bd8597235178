"""Every backend computes every case; hypothesis draws more of them."""

import pytest
from jaxllm_kernels.ragged_paged_attention.api import (
    get_backend,
)
from jaxllm_kernels.ragged_paged_attention.cases import CASES, TOLERANCES, Case, run_case
from jaxllm_kernels.ragged_paged_attention.xla import XlaBackend

BACKENDS = ["reference", "xla"]
# Small tiles and chunks: rows cross more of their borders.
SMALL = XlaBackend(tile_size=4, decode_chunk=16, prefill_chunk=32)


def assert_correct(backend, case: Case, dtype: str, seed: int = 0) -> None:
    result = run_case(backend, case, dtype, seed=seed)
    assert result.all_finite
    assert result.error < TOLERANCES[dtype]


def slow_marked(case: Case):
    return pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.is_slow else [])


@pytest.mark.parametrize("case", [slow_marked(case) for case in CASES])
def test_xla_is_right(case):
    assert_correct(get_backend("xla"), case, "float32")


@pytest.mark.parametrize("case", [slow_marked(case) for case in CASES])
def test_reference_is_right(case):
    if case.max_blocks > 100:
        pytest.skip("the reference looks at all blocks for every token")
    assert_correct(get_backend("reference"), case, "float32")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("mixed", "decodes", "everything")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", BACKENDS)
def test_sixteen_bit_types_are_right(name, dtype, case):
    assert_correct(get_backend(name), case, dtype)

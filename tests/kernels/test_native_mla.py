"""The native latent attention: every case, and the same bits alone and among others."""

import dataclasses

import numpy as np
import pytest
from jaxllm_kernels.mla.cases import CASES, Case, run_case
from jaxllm_kernels.mla.native import NativeLatentBackend

from tests.kernels.test_native_attention import TOLERANCES, on_processors

BY_NAME = {case.name: case for case in CASES}
# What other processors' code always runs.
OFTEN = ("mixed", "sizes_of_deepseek", "fresh_rows")


def is_often(processor: int, name: int, dtype: int) -> bool:
    return (processor + name + dtype) % 2 == 0 and CASES[name].name in OFTEN


@pytest.fixture(scope="module")
def backend(any_library):
    any_library.add_latents()
    return NativeLatentBackend(any_library)


@on_processors(is_often, "name", list(BY_NAME), "dtype", ["float32", "bfloat16"])
def test_cases_are_right(backend, name, dtype):
    result = run_case(backend, BY_NAME[name], dtype)
    assert result.all_finite
    assert result.error < TOLERANCES[dtype]
    assert not (BY_NAME[name].fewest_fresh and result.attends_fresh)


@pytest.mark.parametrize("any_library", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_heads", [3, 16, 70])
def test_a_token_has_the_same_bits_in_every_batch(backend, num_heads, dtype):
    """Alone, where its heads are cut for the threads, among others, in a decode, and in a chunk."""
    among = Case(name="among", rows=((1, 77), (1, 5), (30, 61), (20, 90)), num_heads=num_heads)
    alone = dataclasses.replace(among, rows=among.rows[:1], num_tokens=8, decode_only=True)
    chunk = dataclasses.replace(among, rows=((20, 77),))
    [of_alone] = run_case(backend, alone, dtype).out
    np.testing.assert_array_equal(run_case(backend, among, dtype).out[0], of_alone)
    np.testing.assert_array_equal(run_case(backend, chunk, dtype).out[-1], of_alone)

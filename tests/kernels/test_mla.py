"""Latent attention: every backend computes every case; rows do not depend on their neighbours."""

import dataclasses

import numpy as np
import pytest
from jaxllm_kernels.mla.api import get_latent_backend
from jaxllm_kernels.mla.cases import CASES, TOLERANCES, run_case
from jaxllm_kernels.mla.xla import XlaLatentBackend
from jaxllm_kernels.platform import CHIPS

BY_NAME = {case.name: case for case in CASES}
# Small tiles: rows have more of them. And as on an accelerator, several tiles and blocks at once.
SMALL = XlaLatentBackend(name="small", tile_lines=16)
BATCHED = XlaLatentBackend(
    name="batched", tile_lines=32, decodes_at_once=4, tiles_at_once=3, tokens_at_once=40
)


def assert_correct(backend, case, dtype):
    result = run_case(backend, case, dtype)
    assert result.all_finite
    assert result.error < TOLERANCES[dtype]
    assert not (case.fewest_fresh and result.attends_fresh), "it takes time for fresh rows"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_is_right(case):
    assert_correct(get_latent_backend("xla"), case, "float32")


@pytest.mark.parametrize("name", ["mixed", "decodes", "all_padding", "rows_without_tokens"])
def test_reference_is_right(name):
    assert_correct(get_latent_backend("reference"), BY_NAME[name], "float32")


@pytest.mark.parametrize("backend", [SMALL, BATCHED], ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    "name", ["mixed", "decodes", "page_borders", "rows_without_tokens", "fresh_rows"]
)
def test_xla_is_right_with_other_tiles(backend, name):
    assert_correct(backend, BY_NAME[name], "float32")


@pytest.mark.parametrize(
    ("chip", "dtype"),
    [
        ("cpu", "float16"),
        ("h200", "bfloat16"),
        pytest.param("cpu", "bfloat16", marks=pytest.mark.sweep),
        pytest.param("h200", "float16", marks=pytest.mark.sweep),
    ],
)
def test_xla_is_right_in_16_bits(chip, dtype):
    backend = get_latent_backend("xla").tuned_for(CHIPS[chip])
    assert_correct(backend, BY_NAME["sizes_of_deepseek"], dtype)


@pytest.mark.parametrize("backend", [XlaLatentBackend(), SMALL], ids=lambda backend: backend.name)
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(backend):
    # The same numbers are drawn for the first row; the program is the same, and so are its tiles.
    case = BY_NAME["prefills"]
    alone = dataclasses.replace(case, rows=case.rows[:1])
    (length, _), *_ = case.rows
    together = run_case(backend, case, "float32").out[:length]
    np.testing.assert_array_equal(run_case(backend, alone, "float32").out, together)


def test_a_cache_has_rows_of_whole_lanes():
    for name, width in (("sizes_of_deepseek", 640), ("sizes_of_mistral_small_4", 384)):
        config = BY_NAME[name].config
        cache = get_latent_backend("xla").cache_shape(
            config, num_blocks=3, block_size=16, dtype="bfloat16"
        )
        assert (cache.shape, cache.dtype.itemsize) == ((3, 16, width), 2)


def test_other_backends_are_refused_by_name():
    with pytest.raises(ValueError, match="latent attention, for which there is 'mosaic_sm90' and"):
        get_latent_backend("mosaic_tpu")

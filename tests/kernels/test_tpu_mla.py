"""Latent attention on TPUs, emulated on a CPU: its results, its races, what it refuses."""

import dataclasses

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jaxllm_kernels.mla.api import LatentConfig, get_latent_backend
from jaxllm_kernels.mla.cases import CASES, TOLERANCES, Case, run_case
from jaxllm_kernels.mla.tpu import TpuLatentBackend
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import BatchLimits
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import Tuning

EMULATED = TpuLatentBackend(chip="v5e", interpret=True)
# Rows of many items, chunks of two pieces, and tiles of two rows.
SMALL = dataclasses.replace(
    EMULATED,
    decode_tuning=Tuning(
        step_tokens=2, slot_tokens=64, chunk_tokens=64, piece_tokens=16, num_slots=3
    ),
    prefill_tuning=Tuning(step_tokens=16, slot_tokens=32, chunk_tokens=16, num_slots=2),
)
CASE = {case.name: case for case in CASES}
# Rows of 2 to 8 tokens, over borders of pages and of steps.
SHORT = Case(
    name="short_rows",
    rows=((1, 70), (2, 18), (8, 40), (3, 3), (5, 90), (30, 61)),
    num_heads=4,
)
# Each shape of a program takes seconds to emulate. The tests below cover the other cases together.
RUN_ALWAYS = {"mixed", "decodes", "all_padding_decodes", "fresh_rows"}


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


def assert_correct(backend: TpuLatentBackend, case: Case, dtype: str) -> None:
    # Where the interpreter keeps its findings; there is no public name.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    result = run_case(backend, case, dtype)
    assert result.all_finite
    assert result.error < TOLERANCES[dtype]
    assert not (case.fewest_fresh and result.attends_fresh)
    races = interpret_pallas_call.races
    assert races is not None and not races.races_found


def marked(case: Case):
    marks = [] if case.name in RUN_ALWAYS else [pytest.mark.sweep]
    return pytest.param(case, marks=marks, id=case.name)


# Hundreds of heads take the emulator minutes; `test_heads_in_parts_are_right` has fewer.
@pytest.mark.parametrize("case", [marked(case) for case in CASES if case.num_heads < 100])
def test_every_case_is_right(case):
    assert_correct(EMULATED, case, "float32")


@pytest.mark.parametrize(
    "case",
    [SHORT, pytest.param(CASE["mixed"], marks=pytest.mark.sweep)],
    ids=lambda case: case.name,
)
def test_rows_of_many_items_and_pieces_are_right(case):
    assert_correct(SMALL, case, "float32")


def test_heads_in_parts_are_right():
    # A tile of 16 tokens has 1024 lines, which a prefill takes in two parts, and a short row of 8
    # tokens 512, which are computed by the tokens that it has.
    assert_correct(EMULATED, dataclasses.replace(SHORT, num_heads=64), "float32")


def test_bfloat16_is_right():
    assert_correct(EMULATED, CASE["sizes_of_deepseek"], "bfloat16")


@pytest.mark.sweep
def test_decodes_are_split_between_two_cores():
    assert_correct(dataclasses.replace(SMALL, chip="v4"), CASE["decodes"], "float32")


def test_a_row_alone_has_the_bits_that_it_has_in_a_batch():
    case = CASE["decodes"]
    alone = dataclasses.replace(case, rows=case.rows[:1])
    together = run_case(EMULATED, case, "float32").out[:1]
    np.testing.assert_array_equal(run_case(EMULATED, alone, "float32").out, together)


LIMITS = BatchLimits(num_tokens=2048, num_rows=256, max_blocks=128, block_size=64)
TPUS = [chip for chip in CHIPS.values() if chip.platform == "tpu"]


def check(num_heads: int, chip: str, dtype: str = "bfloat16", **limits: int) -> None:
    config = LatentConfig(num_heads=num_heads, latent_size=512, rope_size=64, scale=0.1)
    get_latent_backend("tpu").check(
        config, dataclasses.replace(LIMITS, **limits), dtype=dtype, chip=CHIPS[chip]
    )


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("num_heads", [1, 2, 5, 16, 20, 32, 64, 128])
def test_every_number_of_heads_has_a_plan(num_heads, chip):
    if (chip.name, num_heads) == ("v4", 128):
        pytest.skip("its memory is too small")
    for block_size in (32, 64, 128):
        check(num_heads, chip.name, block_size=block_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 16, "chip": "h200"}, "does not run on h200; set --attention-backend to xla"),
        ({"num_heads": 16, "chip": "v6e", "dtype": "float16"}, "set --dtype to bfloat16"),
        ({"num_heads": 16, "chip": "v6e", "block_size": 8}, "set --block-size to 16"),
        ({"num_heads": 16, "chip": "v6e", "max_blocks": 1024}, "raise --block-size, or lower"),
        ({"num_heads": 64, "chip": "v4", "block_size": 256}, "set --block-size to 128"),
        ({"num_heads": 128, "chip": "v4"}, "raise --tensor-parallel-size until a device has fewer"),
    ],
)
def test_what_cannot_be_run_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        check(**options)

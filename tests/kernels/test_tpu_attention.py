"""The TPU backend, emulated on a CPU: its results, its races, its plans.

JAX's TPU interpreter moves memory as the kernels ask for it: what was not waited for has not
arrived, memory starts as NaN, every access is checked for bounds and for races. What it does not
check is whether a TPU's compiler takes the kernels; test_tpu_compile.py does.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jaxllm_kernels.platform import CHIPS, chip_of
from jaxllm_kernels.ragged_paged_attention import tuned
from jaxllm_kernels.ragged_paged_attention.api import (
    SHORT_ROW,
    AttentionConfig,
    BatchLimits,
    RaggedBatch,
    get_backend,
)
from jaxllm_kernels.ragged_paged_attention.cases import (
    CASES,
    TOLERANCES,
    Case,
    CaseResult,
    run_case,
)
from jaxllm_kernels.ragged_paged_attention.tpu import TpuBackend
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import Tuning

EMULATED = TpuBackend(chip="v5e", interpret=True)
# Two pages in a slot and two decodes in a step: short rows have many items and steps, too.
SMALL = dataclasses.replace(
    EMULATED,
    decode_tuning=Tuning(step_tokens=2, slot_tokens=32, chunk_tokens=16, num_slots=3),
    prefill_tuning=Tuning(step_tokens=16, slot_tokens=32, chunk_tokens=16, num_slots=2),
)
CASE = {case.name: case for case in CASES}


def races_were_found() -> bool:
    # Where the interpreter keeps its findings; there is no public name.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    return races is not None and races.races_found


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


def assert_correct(backend: TpuBackend, case: Case, dtype: str, seed: int = 0) -> CaseResult:
    result = run_case(backend, case, dtype, seed=seed)
    assert result.all_finite
    assert result.error < TOLERANCES[dtype]
    assert not races_were_found()
    return result


# Each shape of a program takes seconds to emulate. These others cover together.
SPARED = {
    "block_size_32",
    "block_size_64",
    "block_size_128",
    "chunk_longer_than_a_page_of_8",
    "chunk_longer_than_a_page_of_8_over_history",
    "everything",
    "everything_with_fp8_kv",
    "everything_with_short_rows",
    "fp8_kv",
    "gqa_3",
    "gqa_8",
    "head_size_80",
    "head_size_96",
    "head_size_128",
    "head_size_256",
    "int8_kv",
    "int8_kv_decodes",
    "mha",
    "mqa",
    "no_padding",
    "only_short_rows",
    "out_of_range_block_ids_before_a_window",
    "short_rows_and_no_others",
    "short_rows_in_a_window",
    "short_rows_of_one_head",
    "short_rows_over_borders",
    "short_rows_over_borders_with_fp8_kv",
    "short_rows_with_int8_kv",
    "sinks",
    "soft_cap",
    "window_below_a_page",
    "window_decodes",
    "window_of_one",
    "window_of_pages",
}


# What a TPU computes in thousands and in tens of thousands takes the emulator many minutes.
LONG_BESIDE_SHORT = Case(
    name="hundreds_of_tokens_beside_tens",
    # With the short rows of `short_rows_of_one_head`.
    rows=((1, 700), *[(1, 10)] * 8, *CASE["short_rows"].rows[1:-1], (10, 500)),
    num_tokens=128,
    num_rows=16,
    max_blocks=48,
    num_heads=2,
    num_kv_heads=1,
    head_size=128,
)
EMULATED_CASES = [
    *(case for case in CASES if case.max_blocks < 100 and case.is_usual),
    LONG_BESIDE_SHORT,
]


def sweep_marked(case: Case):
    return pytest.param(
        case, marks=[pytest.mark.sweep] if case.name in SPARED else [], id=case.name
    )


@pytest.mark.parametrize("case", [sweep_marked(case) for case in EMULATED_CASES])
def test_every_case_is_right(case):
    assert_correct(EMULATED, case, "float32")


def in_program_of(name: str, other: Case, **changes) -> Case:
    """The rows of a case in the program of another, which is compiled already."""
    rows = {field: getattr(CASE[name], field) for field in ("rows", "unused_entries")}
    return dataclasses.replace(other, name=name, **rows, **changes)


WINDOWED = CASE["short_rows_in_a_window"]


# What is spared above for its program, of rows that no other case has.
@pytest.mark.parametrize(
    "case",
    [
        in_program_of("only_short_rows", CASE["mixed"]),
        in_program_of("short_rows_and_no_others", CASE["mixed"]),
        WINDOWED,
        in_program_of("out_of_range_block_ids_before_a_window", WINDOWED),
        in_program_of("window_decodes", WINDOWED, num_tokens=8, decode_only=True),
    ],
    ids=lambda case: case.name,
)
def test_cases_that_share_a_program_are_right(case):
    assert_correct(EMULATED, case, "float32")


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.sweep) for name in ("mixed", "everything")),
        "decodes",
        "chunk_longer_than_a_page",
        "short_rows_over_borders",
    ],
)
def test_rows_of_many_items_are_right(name):
    assert_correct(SMALL, CASE[name], "float32")


def test_rows_of_many_items_with_everything_are_right():
    # Of two pages, which for 8 bits are of 32 tokens.
    two_pages = dataclasses.replace(
        EMULATED,
        decode_tuning=Tuning(step_tokens=2, slot_tokens=64, chunk_tokens=32, num_slots=3),
        prefill_tuning=Tuning(step_tokens=16, slot_tokens=64, chunk_tokens=32, num_slots=2),
    )
    assert_correct(two_pages, CASE["everything_with_fp8_kv"], "float32")


def test_items_of_many_units_are_right():
    # A tile's keys fill several items of several chunks each, and heads are in two batches. The
    # middle of a window needs no masks. Pages are written while units are computed.
    case = Case(
        name="items_of_many_units",
        rows=((1, 130), (30, 150), (9, 9)),
        num_heads=4,
        num_kv_heads=4,
        block_size=8,
        max_blocks=20,
        sliding_window=75,
    )
    assert SMALL.prefill_tuning is not None
    two_at_once = dataclasses.replace(
        SMALL,
        decode_tuning=Tuning(
            step_tokens=2, slot_tokens=64, chunk_tokens=32, num_slots=3, batch_heads=2
        ),
        prefill_tuning=dataclasses.replace(SMALL.prefill_tuning, batch_heads=2),
    )
    assert_correct(two_at_once, case, "float32")


@pytest.mark.parametrize(
    "name",
    [
        "everything_with_short_rows",
        *(
            pytest.param(name, marks=pytest.mark.sweep)
            for name in (
                "mixed", "gqa_3", "head_size_80", "head_size_96", "head_size_128", "head_size_256",
                "everything_with_fp8_kv",
            )
        ),
    ],
)  # fmt: skip
def test_bfloat16_is_right(name):
    assert_correct(EMULATED, CASE[name], "bfloat16")


def test_large_blocks_are_right_in_bfloat16():
    # With heads that are padded, in groups of three.
    case = dataclasses.replace(CASE["block_size_128"], head_size=80, num_heads=6)
    assert_correct(EMULATED, case, "bfloat16")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "head_size"),
    [("int8_kv", 80), ("fp8_kv", 128), ("int8_kv", 256), ("short_rows_with_int8_kv", 128)],
)
def test_caches_of_8_bits_are_right_in_bfloat16(name, head_size):
    case = dataclasses.replace(CASE[name], head_size=head_size)
    assert_correct(EMULATED, case, "bfloat16")


@pytest.mark.parametrize("name", ["int8_kv", pytest.param("mixed", marks=pytest.mark.sweep)])
def test_the_largest_heads_are_right_in_bfloat16(name):
    case = dataclasses.replace(CASE[name], head_size=512, num_kv_heads=1)
    assert_correct(EMULATED, case, "bfloat16")


TWO_CORES = dataclasses.replace(SMALL, chip="v4")

# Tokens that see later ones. A short row without, and one whose span begins in its history; a chunk
# of which one span ends with a page and lies over three tiles, and one ends with the row.
AHEAD = Case(
    name="tokens_that_see_later_ones",
    rows=((1, 20), (3, 12), (6, 14), (40, 70)),
    spans=((2, 6, 12), (3, 34, 64), (3, 64, 70)),
    block_size=8,
)


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        pytest.param(SMALL, {"sliding_window": 11, "has_sinks": True}, id="in a window"),
        *(
            pytest.param(backend, changes, id=name, marks=pytest.mark.sweep)
            for name, (backend, changes) in {
                "without": (SMALL, {}),
                "in large items": (EMULATED, {"sliding_window": 19}),
                "of two cores": (TWO_CORES, {"num_kv_heads": 4}),
                "of one head": (TWO_CORES, {"num_kv_heads": 1, "sliding_window": 19}),
                "in parts": (EMULATED, {"num_heads": 16, "num_kv_heads": 1, "soft_cap": 3.0}),
                "as int8": (EMULATED, {"block_size": 32, "kv_dtype": "int8"}),
            }.items()
        ),
    ],
)
def test_tokens_see_later_ones(backend, changes):
    assert_correct(backend, dataclasses.replace(AHEAD, **changes), "float32")


def test_tokens_that_see_no_later_ones_are_as_without():
    """Of the same program as in a window, in which no segment is written ahead."""
    case = dataclasses.replace(AHEAD, sliding_window=11, has_sinks=True)
    none = dataclasses.replace(case, spans=((0, 19, 20),))
    assert_correct(SMALL, none, "float32")


_ONLY_DECODES = ((1, 1), (1, 3), (1, 20))
_BESIDE_CHUNKS = (*_ONLY_DECODES, (5, 37), (8, 40), (3, 3), (30, 45))


# By heads, or, where there is one, by steps.
@pytest.mark.parametrize(
    ("num_kv_heads", "name", "rows"),
    [
        (1, "mixed", _BESIDE_CHUNKS),
        (2, "decodes", _ONLY_DECODES),
        pytest.param(2, "mixed", _BESIDE_CHUNKS, marks=pytest.mark.sweep),
        pytest.param(1, "decodes", _ONLY_DECODES, marks=pytest.mark.sweep),
    ],
)
def test_work_is_split_between_two_cores(num_kv_heads, name, rows):
    # In a program of the size that computes their history, so that one is compiled.
    case = dataclasses.replace(CASE[name], rows=rows, num_kv_heads=num_kv_heads)
    assert_correct(TWO_CORES, case, "float32")


def test_short_rows_are_right_and_equal_to_chunks():
    case = CASE["short_rows_over_borders"]
    short, chunks = (
        assert_correct(EMULATED, dataclasses.replace(case, has_short=has_short), "float32")
        for has_short in (True, False)
    )
    np.testing.assert_allclose(short.out, chunks.out, rtol=1e-5, atol=1e-5)
    assert (short.out != chunks.out).any()  # as they are computed in other orders


def test_a_decode_may_be_given_as_a_prefill_of_one_token():
    case = dataclasses.replace(CASE["decodes_in_a_mixed_program"], num_decodes=0)
    assert_correct(EMULATED, case, "float32")


def outputs_of(place: int, *rows: tuple[int, int]) -> np.ndarray:
    """What a step of these rows makes of the one at a place. In the program of other cases."""
    starts = np.cumsum([0, *(length for length, _ in rows)])
    case = dataclasses.replace(CASE["mixed"], rows=rows)
    return run_case(EMULATED, case, "float32").out[starts[place] : starts[place + 1]]


@pytest.mark.parametrize("row", [(1, 100), (30, 61)], ids=["decode", "prefill"])
def test_a_row_alone_has_the_bits_that_it_has_among_others(row):
    together = outputs_of(0, row, (1, 33), (17, 17))
    np.testing.assert_array_equal(outputs_of(0, row), together)
    # Behind rows of as many drawn numbers, so that it is elsewhere in the step and in the cache.
    second, third = outputs_of(1, (1, 40), row), outputs_of(2, (1, 20), (1, 20), row)
    np.testing.assert_array_equal(second, third)


IN_SMALL_BLOCKS = Case(
    name="in_small_blocks", rows=(), num_heads=2, num_kv_heads=1, head_size=32, block_size=8
)


@pytest.mark.parametrize(
    "name", ["chunk_longer_than_a_page_of_8", "chunk_longer_than_a_page_of_8_over_history"]
)
def test_chunks_longer_than_a_page_of_8_are_right(name):
    assert_correct(SMALL, in_program_of(name, IN_SMALL_BLOCKS), "float32")


@st.composite
def ragged_rows(draw) -> tuple[int, tuple[tuple[int, int], ...]]:
    """A number of decodes and the rows of a step of at most 60 tokens, 6 rows, 80 of context."""
    num_decodes = draw(st.integers(0, 2))
    lengths = [1] * num_decodes + draw(st.lists(st.integers(2, SHORT_ROW), max_size=2))
    room = 60 - sum(lengths)
    for _ in range(draw(st.integers(0, 2))):
        lengths.append(draw(st.integers(0, room)))
        room -= lengths[-1]
    contexts = [n + draw(st.integers(0, 80 - n)) if n else 0 for n in lengths]
    return num_decodes, tuple(zip(lengths, contexts, strict=True))


@pytest.mark.parametrize(
    ("sliding_window", "examples"),
    [(None, 4), *(pytest.param(window, 8, marks=pytest.mark.sweep) for window in (None, 19))],
)
def test_drawn_batches_are_right(sliding_window, examples):
    @settings(max_examples=examples, deadline=None)
    @given(drawn=ragged_rows(), seed=st.integers(0, 1000))
    def check(drawn, seed):
        num_decodes, rows = drawn
        case = dataclasses.replace(
            IN_SMALL_BLOCKS, rows=rows, num_decodes=num_decodes, sliding_window=sliding_window
        )
        assert_correct(SMALL, case, "float32", seed)

    check()


def small_batch() -> RaggedBatch:
    """Rows of 1, 5 and no tokens in blocks of 8."""
    return RaggedBatch(
        query_starts=jnp.array([0, 1, 6, 6], jnp.int32),
        context_lens=jnp.array([3, 11, 0], jnp.int32),
        block_tables=jnp.array([[1, 99], [3, 2], [77, -9]], jnp.int32),
        num_decodes=jnp.array(1, jnp.int32),
        block_size=8,
        decode_only=False,
    )


CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=64, scale=0.125)


@functools.partial(jax.jit, static_argnames=("backend", "config"))
def step(backend, q, k, v, cache, batch, config):
    prepared = backend.prepare(batch, (config,), num_tokens=len(q))
    return backend.attend(q, k, v, cache, batch, prepared, config=config)


def test_only_the_tokens_of_the_step_are_written():
    batch = small_batch()
    spec = EMULATED.cache_shape(CONFIG, num_blocks=6, block_size=8, dtype=jnp.float32)
    before = np.random.default_rng(0).normal(size=spec.shape).astype(spec.dtype)
    q, k, v = (jnp.ones((8, heads, 64)) for heads in (4, 2, 2))
    _, after = step(EMULATED, q, k, v, jnp.asarray(before), batch, CONFIG)
    changed = (np.asarray(after) != before).any(axis=(1, 3))  # [blocks, tokens]
    written = np.zeros((6, 8), bool)
    written[1, 2] = True  # position 2 of row 0
    written[3, 6:] = written[2, :3] = True  # positions 6 to 10 of row 1
    np.testing.assert_array_equal(changed, written)


def test_every_decode_writes_its_token():
    contexts, num_blocks = [1, 8, 9, 16, 20], 8
    tables = np.array([[7, -1, 99], [5, 9, 9], [0, 6, -5], [2, 1, 50], [3, 3, 4]], np.int32)
    batch = RaggedBatch(
        query_starts=jnp.array([0, 1, 2, 3, 4, 5, 5], jnp.int32),
        context_lens=jnp.array([*contexts, 0], jnp.int32),
        block_tables=jnp.asarray(np.concatenate([tables, [[77, -1, 0]]]), jnp.int32),
        num_decodes=jnp.array(5, jnp.int32),
        block_size=8,
        decode_only=True,
    )
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(6, heads, 64)).astype(np.float32) for heads in (4, 2, 2))
    spec = SMALL.cache_shape(CONFIG, num_blocks=num_blocks, block_size=8, dtype=jnp.float32)
    before = rng.normal(size=spec.shape).astype(np.float32)
    expected = before.copy()
    for row, context in enumerate(contexts):
        block, place = tables[row, (context - 1) // 8], (context - 1) % 8
        expected[block, :, place] = np.concatenate([k[row], v[row]], axis=-1)
    _, after = step(SMALL, q, k, v, jnp.asarray(before), batch, CONFIG)
    np.testing.assert_array_equal(after, expected)
    assert not races_were_found()


def test_what_is_not_a_number_stays_in_its_row():
    batch = small_batch()
    spec = EMULATED.cache_shape(CONFIG, num_blocks=6, block_size=8, dtype=jnp.float32)
    q, k, v = (jnp.ones((8, heads, 64)) for heads in (4, 2, 2))
    for tokens, healthy in ((slice(0, 1), slice(1, 6)), (slice(1, 6), slice(0, 1))):
        broken = v.at[tokens].set(jnp.nan)
        out, _ = step(EMULATED, q, k, broken, jnp.zeros(spec.shape), batch, CONFIG)
        assert np.isnan(out[tokens]).all()
        assert np.isfinite(out[healthy]).all()


def test_shards_of_one_kv_head_agree_with_the_whole():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(8, heads, 64)), jnp.float32) for heads in (4, 2, 2))
    spec = EMULATED.cache_shape(CONFIG, num_blocks=6, block_size=8, dtype=jnp.float32)
    cache, batch = jnp.zeros(spec.shape), small_batch()
    shard = dataclasses.replace(CONFIG, num_heads=2, num_kv_heads=1)
    halves = zip(*(jnp.split(x, 2, axis=1) for x in (q, k, v, cache)), strict=True)
    parts = [step(EMULATED, *half, batch, shard) for half in halves]
    whole = step(EMULATED, q, k, v, cache, batch, CONFIG)
    for result, results in zip(whole, zip(*parts, strict=True), strict=True):
        joined = np.concatenate(results, axis=1)
        np.testing.assert_allclose(result[:6], joined[:6], rtol=1e-6, atol=1e-6)


LIMITS = BatchLimits(num_tokens=2048, num_rows=256, max_blocks=128, block_size=64)
TPUS = [chip for chip in CHIPS.values() if chip.platform == "tpu"]


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (7, 1), (32, 8), (64, 64)])
@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_every_shape_has_a_plan_on_every_chip(
    dtype, kv_dtype, num_heads, num_kv_heads, head_size, chip
):
    config = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=1.0,
        kv_dtype=kv_dtype,
    )
    for block_size in (32, 64, 128, 256):
        limits = dataclasses.replace(LIMITS, block_size=block_size)
        get_backend("tpu").check(config, limits, dtype=dtype, chip=chip)


def refusal(num_heads, head_size, kv_dtype, dtype, chip, block_size) -> str:
    """What a model of one kv head and contexts of 8192 tokens is told; empty if it is accepted."""
    config = AttentionConfig(
        num_heads=num_heads, num_kv_heads=1, head_size=head_size, scale=1.0, kv_dtype=kv_dtype
    )
    limits = dataclasses.replace(LIMITS, block_size=block_size, max_blocks=8192 // block_size)
    try:
        get_backend("tpu").check(config, limits, dtype=dtype, chip=chip)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("chip", TPUS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_heads", [96, 128])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_large_group_has_a_plan_or_advice_that_helps(dtype, kv_dtype, num_heads, head_size, chip):
    model = head_size, kv_dtype, dtype, chip
    sizes = (256, 128, 64, 32)
    said = [refusal(num_heads, *model, size) for size in sizes]
    if "" in said:
        best = said.index("")
        advice = f"; set --block-size to {sizes[best]}"
    else:
        best = len(sizes)
        advice = (
            "; no block size helps: raise --tensor-parallel-size until a device has fewer than "
            f"{num_heads} query heads for a kv head, or set --attention-backend to xla "
            "and, since XLA copies the cache, --kv-cache-memory-bytes to a small part of the memory"
        )
        # As on two devices, which have the kv head each, and half of its query heads; on four.
        halves = [refusal(num_heads // n, *model, 64) for n in (2, 4)]
        assert "" in halves
    assert all(message.endswith(advice) for message in said[:best])
    assert chip.name == "v4" or best == 0


@pytest.mark.parametrize(
    ("limits", "dtype", "chip", "message"),
    [
        ({}, jnp.bfloat16, "cpu", "set --attention-backend to xla"),
        ({}, jnp.float16, "v5e", "set --dtype to bfloat16"),
        ({"block_size": 8}, jnp.bfloat16, "v5e", "set --block-size to 16"),
        ({"max_blocks": 1024}, jnp.bfloat16, "v5e", "raise --block-size, or lower --max-model-len"),
        ({"block_size": 8192}, jnp.float32, "v4", "set --block-size to 1024, and lower --max"),
        ({"block_size": 2048, "max_blocks": 4}, jnp.float32, "v4", "set --block-size to 1024$"),
    ],
)
def test_what_cannot_be_run_is_refused(limits, dtype, chip, message):
    with pytest.raises(ValueError, match=message):
        get_backend("tpu").check(
            CONFIG, dataclasses.replace(LIMITS, **limits), dtype=dtype, chip=CHIPS[chip]
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk": 8}, "does not cut contexts into chunks .*; set --attention-backend xla"),
        ({"v_head_size": 128}, "values have the size of keys, 64, not 128"),
    ],
)
def test_what_only_other_backends_support_is_refused(change, message):
    config = dataclasses.replace(CONFIG, **change)
    with pytest.raises(ValueError, match=message):
        get_backend("tpu").check(config, LIMITS, dtype=jnp.bfloat16, chip=CHIPS["v5e"])


def test_an_unknown_tpu_is_refused():
    chip = dataclasses.replace(CHIPS["v5e"], name="TPU v99", vmem_bytes=0)
    with pytest.raises(ValueError, match="does not know the chip 'TPU v99'"):
        get_backend("tpu").check(CONFIG, LIMITS, dtype=jnp.bfloat16, chip=chip)


@pytest.fixture
def told(monkeypatch, caplog):
    """What is logged of sizes, as if nothing had been before."""
    tuned._log_missing.cache_clear()
    # As in a process that has an engine, where what the kernels log does not reach the root.
    monkeypatch.setattr(tuned.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(tuned.logger, "propagate", False)
    with caplog.at_level("INFO", logger=tuned.logger.name):
        yield lambda: caplog.messages


def test_measured_sizes_are_found_and_missing_ones_are_logged_once(tmp_path, monkeypatch, told):
    entry = '{"k": [{"key": {"heads": 2}, "sizes": {"slots": 3}, "measured": {}}]}'
    (tmp_path / "chip.json").write_text(entry)
    monkeypatch.setattr(tuned, "_FOLDER", tmp_path)
    for heads, sizes in ((2, {"slots": 3}), (4, None), (4, None)):
        assert tuned.lookup("chip", "k", {"heads": heads}) == sizes
        tuned.log_if_missing("chip", "k", {"heads": heads})
    assert told() == ["k on chip: nothing measured for heads=4; sizes by formula"]


def test_sizes_that_are_refused_or_tried_for_advice_are_not_logged(told):
    group = dataclasses.replace(CONFIG, num_heads=128, num_kv_heads=1)
    v4, large = CHIPS["v4"], dataclasses.replace(LIMITS, block_size=2048, max_blocks=4)
    with pytest.raises(ValueError, match="of on-chip memory"):
        get_backend("tpu").check(group, large, dtype=jnp.float32, chip=v4)
    assert not told()
    TpuBackend(decode_tuning=SMALL.decode_tuning).check(CONFIG, LIMITS, dtype=jnp.bfloat16, chip=v4)
    assert [message.split(",")[0] for message in told()] == [
        f"tpu_prefill on v4: nothing measured for block_size={LIMITS.block_size}"
    ]


@pytest.mark.tpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_right_on_a_tpu(case, dtype):
    chip = chip_of(jax.devices()[0])
    if chip.platform != "tpu":
        pytest.skip(f"needs a TPU, and this is a {chip.name}")
    backend = get_backend("tpu").tuned_for(chip)
    limits = BatchLimits(
        num_tokens=case.num_tokens,
        num_rows=case.num_rows,
        max_blocks=case.max_blocks,
        block_size=case.block_size,
    )
    try:
        backend.check(case.config, limits, dtype=dtype, chip=chip)
    except ValueError as refused:
        pytest.skip(str(refused))
    result = run_case(backend, case, dtype)
    assert result.all_finite
    assert result.error < TOLERANCES[dtype]

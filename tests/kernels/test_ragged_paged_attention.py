"""Every backend computes every case; hypothesis draws more of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention import xla
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    BatchLimits,
    RaggedBatch,
    default_backends,
    get_backend,
    locate_tokens,
    register_backend,
)
from jaxllm_kernels.ragged_paged_attention.cases import CASES, TOLERANCES, Case, run_case
from jaxllm_kernels.ragged_paged_attention.xla import XlaBackend

BACKENDS = ["reference", "xla"]
# Small tiles: rows have more of them.
SMALL = XlaBackend(name="xla_small", tile_size=4)
# As on an accelerator: several tiles and blocks in an iteration.
BATCHED = XlaBackend(
    name="xla_batched", tile_size=8, decodes_at_once=4, tiles_at_once=3, keys_at_once=40
)


def assert_correct(backend, case: Case, dtype: str, seed: int = 0) -> None:
    result = run_case(backend, case, dtype, seed=seed)
    assert result.all_finite
    assert result.error < TOLERANCES[dtype]


def swept(names: str) -> list:
    """All cases, of which the slow ones and these, which others cover together, are a sweep."""
    return [
        pytest.param(
            case,
            marks=[pytest.mark.sweep] if case.is_slow or case.name in names.split() else [],
            id=case.name,
        )
        for case in CASES
    ]


# Each shape of a program takes about a second. These are always computed in batches.
_IN_BATCHES = """
    short_rows_and_no_others short_rows_of_one_head short_rows_in_a_window short_rows_with_int8_kv
    block_size_32 sinks window_of_pages chunks_of_pages out_of_range_block_ids_before_a_window
"""


@pytest.mark.parametrize("case", swept(_IN_BATCHES + "gqa_3 head_size_96 head_size_128"))
def test_xla_is_right(case):
    assert_correct(get_backend("xla"), case, "float32")


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.sweep)]
)
def test_xla_is_right_with_the_largest_heads(dtype):
    (case,) = (case for case in CASES if case.name == "head_size_256")
    case = dataclasses.replace(case, head_size=512, num_heads=8, num_kv_heads=1)
    assert_correct(get_backend("xla"), case, dtype)


# Here the types of caches and layouts of heads matter, and no rows.
_IN_16_BITS_AS_IN_32 = """
    decodes_in_a_mixed_program one_token all_padding all_padding_decodes rows_without_tokens
    ends_on_a_page_border starts_on_a_page_border chunk_longer_than_a_page no_padding
    chunk_longer_than_a_page_over_history chunk_longer_than_a_page_of_8 mha mqa gqa_8 soft_cap sinks
    chunk_longer_than_a_page_of_8_over_history out_of_range_block_ids window_of_one window_decodes
    out_of_range_block_ids_before_a_window more_rows_than_tokens window_below_a_page window_of_pages
    block_size_32 block_size_64 head_size_96 head_size_128 only_short_rows short_rows_and_no_others
    short_rows_of_one_head short_rows_in_a_window chunks_below_a_page chunks_of_pages
    chunks_over_borders_of_pages chunks_of_decodes smaller_values larger_values fp8_kv
    thousands_of_tokens_beside_tens
"""


@pytest.mark.parametrize("case", swept(_IN_16_BITS_AS_IN_32))
def test_xla_is_right_in_bfloat16(case):
    assert_correct(get_backend("xla"), case, "bfloat16")


# Of heads a batch has no more than a single one.
_IN_BATCHES_AS_ALONE = """
    head_size_80 head_size_96 head_size_128 head_size_256 mha mqa gqa_3 gqa_8 only_short_rows
    no_padding chunk_longer_than_a_page_of_8 chunk_longer_than_a_page_of_8_over_history
    more_rows_than_tokens block_size_64 soft_cap window_of_one window_below_a_page
    chunks_below_a_page chunks_over_borders_of_pages chunks_of_decodes smaller_values larger_values
    fp8_kv everything_with_short_rows short_rows_over_borders_with_fp8_kv
    thousands_of_tokens_beside_tens
"""


@pytest.mark.parametrize("case", swept(_IN_BATCHES_AS_ALONE))
def test_xla_is_right_in_batches(case):
    assert_correct(BATCHED, case, "float32")


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in swept("everything fp8_kv int8_kv_decodes short_rows_over_borders_with_fp8_kv")
        if "everything" in case.id or case.values[0].kv_dtype
    ],
)
def test_xla_is_right_as_tuned_for_a_gpu(case):
    assert_correct(get_backend("xla").tuned_for(CHIPS["h200"]), case, "bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla_is_right_on_a_gpu(case, dtype, gpu):
    assert_correct(get_backend("xla").tuned_for(gpu), case, dtype)


# What is of a program's sizes is nothing to the reference, and features meet each other.
_SIZES_AND_FEATURES_ALONE = """
    only_short_rows short_rows_and_no_others short_rows_of_one_head short_rows_in_a_window
    everything_with_short_rows short_rows_with_int8_kv short_rows_over_borders_with_fp8_kv
    no_padding out_of_range_block_ids_before_a_window mha gqa_3 gqa_8
    head_size_96 head_size_128 head_size_256
    block_size_32 block_size_64 block_size_128 soft_cap sinks window_below_a_page window_of_pages
    window_decodes chunks_of_pages chunks_over_borders_of_pages chunks_of_decodes smaller_values
    fp8_kv
"""


@pytest.mark.parametrize("case", swept(_SIZES_AND_FEATURES_ALONE))
def test_reference_is_right(case):
    if case.max_blocks > 100:
        pytest.skip("the reference looks at all blocks for every token")
    assert_correct(get_backend("reference"), case, "float32")


# XLA in bfloat16 is above.
@pytest.mark.parametrize("case", [c for c in CASES if c.name in ("mixed", "everything")])
@pytest.mark.parametrize(
    ("name", "dtype"), [("reference", "bfloat16"), ("reference", "float16"), ("xla", "float16")]
)
def test_sixteen_bit_types_are_right(name, dtype, case):
    assert_correct(get_backend(name), case, dtype)


@st.composite
def ragged_rows(draw) -> tuple[int, tuple[tuple[int, int], ...]]:
    """A number of decodes and the rows of a step of at most 32 tokens, 6 rows, 48 of context."""
    num_decodes = draw(st.integers(0, 3))
    lengths, room = [1] * num_decodes, 32 - num_decodes
    for _ in range(draw(st.integers(0, 3))):
        lengths.append(draw(st.integers(0, room)))
        room -= lengths[-1]
    contexts = [n + draw(st.integers(0, 48 - n)) if n else 0 for n in lengths]
    return num_decodes, tuple(zip(lengths, contexts, strict=True))


@pytest.mark.parametrize("sliding_window", [None, 7])
@pytest.mark.parametrize(
    "backend", [get_backend("reference"), SMALL, BATCHED], ids=lambda b: b.name
)
@settings(max_examples=25, deadline=None)
@given(drawn=ragged_rows(), seed=st.integers(0, 1000))
def test_drawn_batches_are_right(backend, sliding_window, drawn, seed):
    num_decodes, rows = drawn
    case = Case(
        name="drawn",
        rows=rows,
        num_decodes=num_decodes,
        # The shape of the program that computes a case's history, so that one is compiled.
        num_tokens=64,
        max_blocks=6,
        head_size=16,
        block_size=8,
        sliding_window=sliding_window,
    )
    assert_correct(backend, case, "float32", seed)


def test_a_decode_may_be_given_as_a_prefill_of_one_token():
    case = next(c for c in CASES if c.name == "decodes_in_a_mixed_program")
    assert_correct(get_backend("xla"), dataclasses.replace(case, num_decodes=0), "float32")


def small_batch(decode_only: bool = False) -> RaggedBatch:
    """Rows of 1, 5 and no tokens in blocks of 4; with decode_only of 1, none and none."""
    return RaggedBatch(
        query_starts=jnp.array([0, 1, 1, 1] if decode_only else [0, 1, 6, 6], jnp.int32),
        context_lens=jnp.array([3, 0, 0] if decode_only else [3, 7, 0], jnp.int32),
        block_tables=jnp.array([[1, 99], [3, 2], [77, -9]], jnp.int32),
        num_decodes=jnp.array(1, jnp.int32),
        block_size=4,
        decode_only=decode_only,
    )


CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)


def test_tokens_are_located_in_their_rows():
    places = locate_tokens(small_batch(), 8)
    assert places.rows[:6].tolist() == [0, 1, 1, 1, 1, 1]
    assert places.positions.tolist() == [2, 2, 3, 4, 5, 6, -1, -1]
    assert locate_tokens(small_batch(decode_only=True), 3).positions.tolist() == [2, -1, -1]


@pytest.mark.parametrize("name", BACKENDS)
def test_only_the_tokens_of_the_step_are_written(name):
    backend, batch = get_backend(name), small_batch()
    spec = backend.cache_shape(CONFIG, num_blocks=6, block_size=4, dtype=jnp.float32)
    before = np.random.default_rng(0).normal(size=spec.shape).astype(spec.dtype)
    q, k, v = (jnp.ones((8, heads, 16)) for heads in (4, 2, 2))
    prepared = backend.prepare(batch, (CONFIG,), num_tokens=8)
    _, after = backend.attend(q, k, v, jnp.asarray(before), batch, prepared, config=CONFIG)
    changed = (np.asarray(after) != before).any(axis=(1, 2, 4))  # [blocks, tokens]
    written = np.zeros((6, 4), bool)
    written[1, 2] = True  # position 2 of row 0
    written[3, 2:] = written[2, :3] = True  # positions 2 to 6 of row 1
    np.testing.assert_array_equal(changed, written)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("decode_only", [True, False])
def test_donated_caches_are_updated_in_place_through_a_nested_jit(decode_only, dtype):
    backend, batch = get_backend("xla"), small_batch(decode_only)
    num_tokens, num_layers = (3 if decode_only else 8), 2
    cache = backend.cache_shape(CONFIG, num_blocks=4096, block_size=4, dtype=dtype)
    q, k = (jax.ShapeDtypeStruct((num_tokens, heads, 16), dtype) for heads in (4, 2))

    @jax.jit
    def layer(q, k, cache, batch, prepared):
        return backend.attend(q, k, k, cache, batch, prepared, config=CONFIG)

    def step(q, k, caches, batch):
        prepared = backend.prepare(batch, (CONFIG,), num_tokens=num_tokens)
        new = []
        for cache in caches:
            q, cache = layer(q, k, cache, batch, prepared)
            new.append(cache)
        return q, new

    compiled = jax.jit(step, donate_argnums=2).lower(q, k, [cache] * num_layers, batch).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    cache_bytes = cache.size * cache.dtype.itemsize
    assert memory.alias_size_in_bytes == num_layers * cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 10


@pytest.mark.parametrize("backend", [get_backend("xla"), BATCHED], ids=lambda b: b.name)
def test_scores_never_exist_for_all_possible_keys(backend):
    num_tokens, num_rows, max_blocks, block_size = 64, 16, 4096, 16
    cache = backend.cache_shape(CONFIG, num_blocks=8192, block_size=block_size, dtype=jnp.float32)
    q, k = (jax.ShapeDtypeStruct((num_tokens, heads, 16), jnp.float32) for heads in (4, 2))
    i32 = jnp.int32
    batch = RaggedBatch(
        query_starts=jax.ShapeDtypeStruct((num_rows + 1,), i32),
        context_lens=jax.ShapeDtypeStruct((num_rows,), i32),
        block_tables=jax.ShapeDtypeStruct((num_rows, max_blocks), i32),
        num_decodes=jax.ShapeDtypeStruct((), i32),
        block_size=block_size,
        decode_only=False,
    )

    def step(q, k, cache, batch):
        prepared = backend.prepare(batch, (CONFIG,), num_tokens=num_tokens)
        return backend.attend(q, k, k, cache, batch, prepared, config=CONFIG)

    compiled = jax.jit(step, donate_argnums=2).lower(q, k, cache, batch).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    score_bytes = 4 * num_tokens * CONFIG.num_heads * max_blocks * block_size
    assert memory.temp_size_in_bytes < score_bytes / 100


@pytest.mark.parametrize(
    ("sliding_window", "expected"),
    [
        # Block by block: of the decode, of the chunk's first four tokens, and of its last.
        (None, [(0, 0), (1, 0), (1, 1), (1, 1), (1, 0)]),
        (2, [(0, 0), (1, 0), (1, 1), (1, 1)]),
    ],
)
def test_only_the_blocks_of_contexts_are_fetched(sliding_window, expected, monkeypatch):
    fetched = []
    fetch = xla._fetch_blocks

    def fetch_and_note(layer, row, first):
        jax.debug.callback(lambda *place: fetched.append(tuple(map(int, place))), row, first)
        return fetch(layer, row, first)

    monkeypatch.setattr(xla, "_fetch_blocks", fetch_and_note)
    config = dataclasses.replace(CONFIG, sliding_window=sliding_window)
    batch = dataclasses.replace(small_batch(), block_tables=jnp.zeros((3, 1000), jnp.int32))
    spec = SMALL.cache_shape(config, num_blocks=6, block_size=4, dtype=jnp.float32)
    q, k, v = (jnp.ones((8, heads, 16)) for heads in (4, 2, 2))
    prepared = SMALL.prepare(batch, (config,), num_tokens=8)
    SMALL.attend(q, k, v, jnp.zeros(spec.shape), batch, prepared, config=config)
    jax.effects_barrier()
    assert sorted(fetched) == sorted(expected)


def test_a_backend_is_found_by_the_name_it_was_registered_under():
    register_backend(SMALL)
    assert get_backend("xla_small") is SMALL


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="registered already"):
        register_backend(XlaBackend(tile_size=8))


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="attention_backend to one of .*reference, .*xla"):
        get_backend("flash")


LIMITS = BatchLimits(num_tokens=2048, num_rows=64, max_blocks=128, block_size=64)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=lambda chip: chip.name)
def test_every_chip_has_a_default_backend(chip):
    best = get_backend(default_backends(chip)[-1]).tuned_for(chip)
    best.check(CONFIG, LIMITS, dtype=jnp.bfloat16, chip=chip)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("change", "dtype", "message"),
    [
        ({"num_heads": 3}, jnp.float32, "3 query heads cannot share 2 kv heads .* config.json"),
        ({"sliding_window": 0}, jnp.float32, "sliding_window=0 .* config.json"),
        ({}, jnp.float8_e4m3fn, "set --dtype"),
    ],
)
def test_what_cannot_be_run_is_refused(name, change, dtype, message):
    config = dataclasses.replace(CONFIG, **change)
    with pytest.raises(ValueError, match=message):
        get_backend(name).check(config, LIMITS, dtype=dtype, chip=CHIPS["cpu"])

"""The native backend for CPUs: every case, and what is the same whatever else is computed."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxllm_kernels.native.library import NoLibrary
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    BatchLimits,
    RaggedBatch,
    get_backend,
)
from jaxllm_kernels.ragged_paged_attention.cases import CASES, Case, run_case
from jaxllm_kernels.ragged_paged_attention.native import NativeBackend

from tests.kernels.conftest import OTHER_PROCESSORS

CONFIG = AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, scale=0.3)
LIMITS = BatchLimits(num_tokens=2048, num_rows=64, max_blocks=128, block_size=32)
# The products of 16-bit values are rounded nowhere but in weights and outputs.
TOLERANCES = {"float32": 1e-6, "bfloat16": 3e-3}


@pytest.fixture(scope="module")
def backend(any_library):
    return NativeBackend(any_library)


def on_processors(always, *names_and_values):
    """Parametrise a test by the processor whose code it runs and by others: by all products of
    these. Run always are those where `always` is true of the indices; of this processor's code, and
    of none without AVX2, it is all."""
    names, values = names_and_values[::2], names_and_values[1::2]
    processors = ("native", *OTHER_PROCESSORS)

    def is_swept(processor: str, indices: tuple[int, ...]) -> bool:
        return processor == "x86-64" or (processor != "native" and not always(*indices))

    return pytest.mark.parametrize(
        ("any_library", *names),
        [
            pytest.param(
                processors[indices[0]],
                *(its[i] for its, i in zip(values, indices[1:], strict=True)),
                marks=[pytest.mark.sweep] * is_swept(processors[indices[0]], indices),
            )
            for indices in itertools.product(
                range(len(processors)), *(range(len(its)) for its in values)
            )
        ],
        indirect=["any_library"],
    )


def every_second(*indices: int) -> bool:
    return sum(indices) % 2 == 0


def assert_correct(backend, case: Case, dtype: str, seed: int = 0) -> None:
    result = run_case(backend, case, dtype, seed=seed)
    assert result.all_finite
    assert result.error < TOLERANCES[dtype]


@on_processors(
    every_second,
    "name",
    [case.name for case in CASES if case.kv_dtype is None and not case.is_slow],
    "dtype",
    ["float32", "bfloat16"],
)
def test_cases_are_right(backend, name, dtype):
    (case,) = (case for case in CASES if case.name == name)
    assert_correct(backend, case, dtype)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [case for case in CASES if case.is_slow], ids=lambda c: c.name)
def test_long_rows_are_right(backend, case, dtype):
    assert_correct(backend, case, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "case", [case for case in CASES if case.kv_dtype is not None], ids=lambda case: case.name
)
def test_caches_of_codes_are_right(library, case, dtype):
    assert_correct(NativeBackend(library), case, dtype)


def test_a_row_of_thirty_thousand_tokens_is_right(library):
    (case,) = (case for case in CASES if case.is_slow)
    assert_correct(NativeBackend(library), case, "float32")


@on_processors(
    every_second,
    "heads",
    [(5, 1), (2, 2), (14, 2), (70, 1)],
    "sizes",
    [(16, 16), (112, 24), (64, 4), (512, 16)],
)
def test_any_heads_and_blocks_are_right(backend, heads, sizes):
    (num_heads, num_kv_heads), (head_size, block_size) = heads, sizes
    case = Case(
        name="any",
        rows=((1, 40), (1, 7), (33, 45)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        block_size=block_size,
    )
    assert_correct(backend, case, "bfloat16")


@st.composite
def ragged_rows(draw) -> tuple[tuple[int, int], ...]:
    """Rows of a step of at most 192 tokens and 400 of context: tiles and chunks of any length."""
    lengths, room = [1] * draw(st.integers(0, 3)), 189
    for _ in range(draw(st.integers(0, 3))):
        lengths.append(draw(st.integers(0, room)))
        room -= lengths[-1]
    return tuple((n, n + draw(st.integers(0, 400 - n)) if n else 0) for n in lengths)


@on_processors(lambda processor, window: window == processor % 3, "sliding_window", [None, 7, 130])
@settings(max_examples=15, deadline=None)
@given(rows=ragged_rows(), seed=st.integers(0, 1000))
def test_drawn_batches_are_right(backend, sliding_window, rows, seed):
    case = Case(
        name="drawn",
        rows=rows,
        num_tokens=192,
        max_blocks=25,
        head_size=16,
        sliding_window=sliding_window,
        has_sinks=seed % 2 == 0,
    )
    assert_correct(backend, case, "float32", seed)


# What is written in is the same for every processor, as is how threads wait for each other.
@on_processors(lambda processor: False)
def test_a_prompt_sees_what_other_threads_write(backend):
    """Who attends before all is written meets what was there before. It takes luck to be early."""
    config = AttentionConfig(num_heads=8, num_kv_heads=8, head_size=256, scale=0.1)
    batch = RaggedBatch(
        query_starts=jnp.array([0, 256], jnp.int32),
        context_lens=jnp.array([256], jnp.int32),
        block_tables=jnp.array([[0, 1]], jnp.int32),
        num_decodes=jnp.int32(0),
        block_size=128,
        decode_only=False,
    )
    spec = backend.cache_shape(config, num_blocks=2, block_size=128, dtype=jnp.float32)
    x = jnp.ones((256, 8, 256))

    @jax.jit
    def step(x):
        cache = jnp.full(spec.shape, jnp.nan, spec.dtype)
        return backend.attend(x, x, x, cache, batch, None, config=config)[0]

    for _ in range(100):
        np.testing.assert_allclose(step(x), x, rtol=1e-6)


class Row:
    """A request in blocks of its own of a cache of 32, block 0 of which is nobody's."""

    def __init__(self, seed: int, length: int, blocks: list[int], dtype):
        rng = np.random.default_rng(seed)
        self.q, self.k, self.v = (
            jnp.asarray(rng.normal(size=(length, heads, 32)), dtype) for heads in (4, 2, 2)
        )
        self.blocks = blocks


def run_step(backend, cache, spans, config=CONFIG):
    """Compute tokens [start, end) of rows, (row, start, end) each, with padding behind them."""
    tables = np.full((len(spans) + 1, 8), 10**6, np.int32)
    for i, (row, _, end) in enumerate(spans):
        used = -(-end // 32)
        tables[i, :used] = row.blocks[:used]
    lengths = [end - start for _, start, end in spans]
    batch = RaggedBatch(
        query_starts=jnp.asarray(np.cumsum([0, *lengths, 0]), jnp.int32),
        context_lens=jnp.asarray([*(end for *_, end in spans), 0], jnp.int32),
        block_tables=jnp.asarray(tables),
        num_decodes=jnp.int32(0),
        block_size=32,
        decode_only=False,
    )
    q, k, v = (
        jnp.concatenate(
            [
                *(getattr(row, name)[start:end] for row, start, end in spans),
                jnp.full((3, heads, 32), jnp.nan, cache.dtype),
            ]
        )
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    out, cache = jax.jit(lambda *operands: backend.attend(*operands, batch, None, config=config))(
        q, k, v, cache
    )
    assert not np.asarray(out[-3:]).any()
    return np.split(np.asarray(out[:-3]).astype(np.float32), np.cumsum(lengths)[:-1]), cache


def empty_cache(backend, dtype):
    spec = backend.cache_shape(CONFIG, num_blocks=32, block_size=32, dtype=dtype)
    return jnp.full(spec.shape, jnp.nan, spec.dtype)


@on_processors(every_second, "dtype", [jnp.float32, jnp.bfloat16], "window", [None, 50])
def test_a_token_is_the_same_alone_and_in_a_crowd_decoded_and_prefilled(backend, dtype, window):
    config = dataclasses.replace(CONFIG, sliding_window=window)
    row = Row(1, 200, [7, 3, 9, 1, 30, 2, 12], dtype)
    others = [Row(2, 150, [4, 5, 6, 8, 10], dtype), Row(3, 90, [20, 21, 22], dtype)]
    [whole], cache = run_step(backend, empty_cache(backend, dtype), [(row, 0, 200)], config)
    np.testing.assert_array_equal(
        run_step(backend, cache, [(row, 199, 200)], config)[0][0], whole[199:]
    )

    crowded, cache = run_step(
        backend,
        empty_cache(backend, dtype),
        [(others[0], 0, 90), (row, 0, 37), (others[1], 0, 90)],
        config,
    )
    np.testing.assert_array_equal(crowded[1], whole[:37])
    spans = [(row, 37, 199), (others[0], 90, 91)]
    crowded, cache = run_step(backend, cache, spans, config)
    np.testing.assert_array_equal(crowded[0], whole[37:199])
    spans = [(others[0], 91, 150), (row, 199, 200)]
    crowded, cache = run_step(backend, cache, spans, config)
    np.testing.assert_array_equal(crowded[1], whole[199:])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_only_the_tokens_of_the_step_are_written(backend, dtype):
    row = Row(1, 70, [5, 2, 9], dtype)
    spec = backend.cache_shape(CONFIG, num_blocks=32, block_size=32, dtype=dtype)
    before = jnp.full(spec.shape, 100, dtype)
    _, after = run_step(backend, before, [(row, 40, 67)])
    changed = (np.asarray(after) != np.asarray(before)).reshape(32, 2, 2, -1)
    per_block = np.zeros(32)
    per_block[[2, 9]] = 24 * 32, 3 * 32  # positions 40 to 63, and 64 to 66
    np.testing.assert_array_equal(changed.sum(axis=-1), np.tile(per_block, (2, 2, 1)).T)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_caches_are_updated_in_place_through_a_nested_jit(backend, dtype):
    cache = backend.cache_shape(CONFIG, num_blocks=4096, block_size=32, dtype=dtype)
    q, k = (jax.ShapeDtypeStruct((8, heads, 32), dtype) for heads in (4, 2))
    i32 = jnp.int32
    batch = RaggedBatch(
        query_starts=jax.ShapeDtypeStruct((4,), i32),
        context_lens=jax.ShapeDtypeStruct((3,), i32),
        block_tables=jax.ShapeDtypeStruct((3, 2), i32),
        num_decodes=jax.ShapeDtypeStruct((), i32),
        block_size=32,
        decode_only=False,
    )

    @jax.jit
    def layer(q, k, cache, batch):
        return backend.attend(q, k, k, cache, batch, None, config=CONFIG)

    def step(q, k, caches, batch):
        new = []
        for cache in caches:
            q, cache = layer(q, k, cache, batch)
            new.append(cache)
        return q, new

    compiled = jax.jit(step, donate_argnums=2).lower(q, k, [cache] * 2, batch).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * cache.size * cache.dtype.itemsize
    assert memory.temp_size_in_bytes < 1 << 20
    shape = ",".join(map(str, cache.shape))
    lines = [line for line in compiled.as_text().splitlines() if f"[{shape}]" in line]
    assert lines and not [line for line in lines if " copy(" in line or "convert(" in line]


@pytest.mark.parametrize(
    "starts, context, block",
    [([0, 9], 9, 5), ([0, 5], 4, 5), ([0, 4], 4, 99), ([0, 4], 4, -1), ([1, 4], 4, 5)],
)
def test_a_batch_that_refers_to_what_is_not_there_does_no_damage(backend, starts, context, block):
    cache = empty_cache(backend, jnp.float32)
    batch = RaggedBatch(
        query_starts=jnp.asarray(starts, jnp.int32),
        context_lens=jnp.asarray([context], jnp.int32),
        block_tables=jnp.asarray([[block]], jnp.int32),
        num_decodes=jnp.int32(0),
        block_size=32,
        decode_only=False,
    )
    q, k = jnp.ones((5, 4, 32)), jnp.ones((5, 2, 32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not exist"):
        jax.block_until_ready(backend.attend(q, k, k, cache, batch, None, config=CONFIG))


@pytest.mark.parametrize(
    ("change", "dtype", "chip", "message"),
    [
        ({"num_heads": 3}, jnp.float32, "cpu", "3 query heads cannot share 2 kv heads"),
        ({"head_size": 40}, jnp.float32, "cpu", "head_size=40"),
        ({"v_head_size": 24}, jnp.float32, "cpu", "head_size=24"),
        ({"chunk": 0}, jnp.float32, "cpu", "chunks of 0 tokens must be at least 1 long"),
        ({"chunk": 8, "sliding_window": 8}, jnp.float32, "cpu", "exclude sliding_window=8"),
        ({}, jnp.float16, "cpu", "dtype='float16'"),
        ({}, jnp.float32, "h200", "for CPUs"),
    ],
)
def test_what_cannot_be_run_is_refused(backend, change, dtype, chip, message):
    config = dataclasses.replace(CONFIG, **change)
    with pytest.raises(ValueError, match=message):
        backend.check(config, LIMITS, dtype=dtype, chip=CHIPS[chip])


def test_a_library_without_codes_refuses_caches_of_them(library):
    without = NativeBackend(dataclasses.replace(library, kv_dtypes=()))
    config = dataclasses.replace(CONFIG, kv_dtype="int8")
    NativeBackend(library).check(config, LIMITS, dtype=jnp.float32, chip=CHIPS["cpu"])
    with pytest.raises(ValueError, match="without caches of int8"):
        without.check(config, LIMITS, dtype=jnp.float32, chip=CHIPS["cpu"])


def test_without_a_library_it_is_refused_and_says_why():
    with pytest.raises(ValueError, match="nothing has loaded it"):
        get_backend("native").check(CONFIG, LIMITS, dtype=jnp.float32, chip=CHIPS["cpu"])
    with pytest.raises(ValueError, match="no compiler"):
        NativeBackend(NoLibrary("no compiler")).check(
            CONFIG, LIMITS, dtype=jnp.float32, chip=CHIPS["cpu"]
        )

"""The Mosaic GPU backend: on a CPU in GPU-interpret mode, and on a Hopper GPU where there is one.

Interpret mode is slow, so there the cases are small ones of their own; a GPU runs all of them.
"""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxllm_kernels.compat import why_no_mosaic_gpu
from jaxllm_kernels.platform import CHIPS
from jaxllm_kernels.ragged_paged_attention import gpu
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    BatchLimits,
    RaggedBatch,
    get_backend,
)
from jaxllm_kernels.ragged_paged_attention.cases import CASES, TOLERANCES, Case, run_case
from jaxllm_kernels.ragged_paged_attention.gpu import MosaicGpuBackend
from jaxllm_kernels.ragged_paged_attention.gpu_softmax import UNSEEN_PRODUCT, score_factor

BACKEND = get_backend("mosaic_sm90")
INTERPRETED = MosaicGpuBackend(name="mosaic_sm90_interpreted", num_workers=2, interpret=True)

CONFIG = AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, scale=0.1)
LIMITS = BatchLimits(num_tokens=2048, num_rows=64, max_blocks=128, block_size=64)

no_mosaic = why_no_mosaic_gpu()
interpreted = pytest.mark.skipif(bool(no_mosaic), reason=f"the Mosaic GPU backend {no_mosaic}")


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e6])
def test_keys_that_are_not_seen_have_no_weight_whatever_their_scale(scale):
    factor = score_factor(jnp.array([scale]), 0, CONFIG)
    score = UNSEEN_PRODUCT * factor
    assert np.isfinite(score)
    assert np.exp2(score) == 0


@dataclass(frozen=True)
class OnlyWrites(MosaicGpuBackend):
    """For histories, of which only the cache is used. XLA writes it, before any kernel runs."""

    def _attend(self, grouped, queries, initial, *_):
        return initial


WRITER = OnlyWrites(name="only_writes", num_workers=2, interpret=True)


def assert_correct(backend, case: Case, dtype: str, capfd, seed: int = 0) -> None:
    history_backend = WRITER if backend is INTERPRETED else None
    result = run_case(backend, case, dtype, seed=seed, history_backend=history_backend)
    assert result.all_finite
    assert result.error < TOLERANCES[dtype]
    assert_no_races(capfd)


def assert_no_races(capfd) -> None:
    """The interpreter prints those that it finds, and goes on."""
    printed = capfd.readouterr()
    assert "RACE" not in printed.out + printed.err


# A decode over two blocks of keys, one over a part of one, a chunk over history, a fresh one.
_MIXED = ((1, 140), (1, 5), (30, 61), (3, 3))
_DECODES = ((1, 1), (1, 17), (1, 150))


# A decode, short rows and a chunk. The first begins a context, the others have two blocks of keys,
# of which some tokens of the second do not see the last one.
_SHORT = ((1, 20), (2, 2), (8, 133), (5, 150), (20, 30))


# Cases that differ only in rows share a program, which takes most of a case's time.
def small(name: str, rows=_MIXED, **changes) -> Case:
    options = {"num_heads": 4, "num_kv_heads": 1, "max_blocks": 13, **changes}
    return Case(name=name, rows=rows, **options)


def everything(name: str, rows, **changes) -> Case:
    options = {"sliding_window": 40, "soft_cap": 3.0, "has_sinks": True, **changes}
    return small(name, rows, **options)


def with_int8(name: str, rows, **changes) -> Case:
    """Two parts of the heads in short rows."""
    return everything(name, rows, num_heads=10, num_kv_heads=2, kv_dtype="int8", **changes)


# Each size and each feature is in one of these, with others.
SMALL_CASES = [
    small("mixed"),
    small("all_padding", ()),
    small("short_rows", _SHORT),
    small("short_rows_as_chunks", _SHORT, has_short=False),
    # Of the common cases those about borders.
    *(
        small(case.name, case.rows)
        for case in CASES
        if case.name
        in {
            "chunk_longer_than_a_page_over_history",
            "ends_on_a_page_border",
            "rows_without_tokens",
        }
    ),
    small(
        "decodes_of_3_heads_of_96",
        _DECODES,
        num_tokens=5,
        num_rows=5,
        decode_only=True,
        num_heads=6,
        num_kv_heads=2,
        head_size=96,
        block_size=32,
    ),
    with_int8("everything_with_int8", _SHORT),
    with_int8("out_of_range_block_ids_before_a_window", _MIXED, unused_entries=(-1, 2**31 - 1)),
    # Each token of a row has another window; more rows than tokens.
    everything(
        "everything_with_fp8_and_12_heads_of_80",
        _SHORT,
        num_tokens=36,
        num_rows=37,
        num_heads=12,
        head_size=80,
        block_size=128,
        sliding_window=6,
        kv_dtype="float8_e4m3fn",
    ),
    # Parts; three blocks, of which the last is not whole, through two stages.
    small(
        "parts_of_heads_of_256_with_int8",
        ((1, 20), (8, 133), (70, 150)),
        num_tokens=128,
        num_heads=5,
        head_size=256,
        kv_dtype="int8",
    ),
]
# Two tiles; one whose first and last blocks are masked, and one between them is not. Of heads that
# share no keys.
TILES = small(
    "tiles_of_heads_of_128_in_a_window",
    ((1, 450), (140, 630)),
    num_tokens=256,
    num_heads=2,
    num_kv_heads=2,
    head_size=128,
    block_size=64,
    sliding_window=400,
)
# Tokens that see later ones. A short row that does, before one that does not and behind one; over
# borders of tiles, warpgroups, blocks of keys and pages; spans side by side, from the first token
# on and up to the last, and one that begins in the history; a tile without.
_AHEAD = ((1, 20), (3, 40), (8, 133), (5, 150), (150, 290), (30, 30))
_SPANS = ((2, 120, 131), (4, 143, 190), (4, 190, 262), (4, 264, 290), (5, 0, 30))
AHEAD = small(
    "tokens_that_see_later_ones",
    _AHEAD,
    spans=_SPANS,
    num_tokens=256,
    max_blocks=20,
    num_heads=2,
    sliding_window=70,
)
SMALL_CASES.append(AHEAD)
# A size or a feature by itself.
SWEPT_CASES = [
    TILES,
    dataclasses.replace(AHEAD, name="later_ones_without_a_window", sliding_window=None),
    with_int8("everything_with_later_ones", ((1, 20), (5, 40), (40, 60)), spans=((2, 22, 57),)),
    small("more_rows_than_tokens", ((1, 20), (5, 12)), num_tokens=8, num_rows=9),
    small("decodes", _DECODES, num_tokens=5, decode_only=True, num_heads=2, num_kv_heads=2),
    small("prefill_of_tiles", ((1, 20), (150, 170)), num_tokens=256),
    small("gqa_3", ((1, 20), (5, 12)), num_heads=6, num_kv_heads=2),
    small("mqa_12", ((1, 20), (5, 12)), num_heads=12),
    small("head_size_80", head_size=80),
    small("head_size_96", head_size=96, block_size=128),
    small("head_size_128", head_size=128, block_size=64),
    small("head_size_256", head_size=256, block_size=128),
    small("block_size_32", block_size=32),
    small("window_below_a_page", sliding_window=5),
    small(
        "window_of_blocks",
        ((1, 450), (70, 560)),
        num_tokens=128,
        max_blocks=36,
        sliding_window=400,
    ),
    everything("everything", _MIXED),
    small("int8_kv", kv_dtype="int8"),
    everything("everything_with_fp8_kv", _MIXED, kv_dtype="float8_e4m3fn"),
    small("short_rows_of_parts", ((1, 20), (8, 133)), num_heads=5, head_size=256),
    small("short_rows_in_a_window", _SHORT, head_size=80, sliding_window=6),
]


@interpreted
@pytest.mark.parametrize(
    "case",
    [*SMALL_CASES, *(pytest.param(case, marks=pytest.mark.sweep) for case in SWEPT_CASES)],
    ids=lambda case: case.name,
)
def test_small_cases_are_right_and_without_races(case, capfd):
    assert_correct(INTERPRETED, case, "bfloat16", capfd)


@interpreted
def test_float16_is_right(capfd):
    assert_correct(INTERPRETED, TILES, "float16", capfd)


@st.composite
def ragged_rows(draw) -> tuple[tuple[int, int], ...]:
    """Rows of a step of at most 32 tokens, 4 rows, 200 of context."""
    lengths = [1] * draw(st.integers(0, 2))
    lengths += draw(st.lists(st.integers(1, 15), max_size=2))
    return tuple((n, n + draw(st.integers(0, 200 - n))) for n in lengths)


@interpreted
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=ragged_rows(), seed=st.integers(0, 1000))
def test_drawn_batches_are_right(capfd, rows, seed):
    assert_correct(INTERPRETED, with_int8("drawn", rows), "bfloat16", capfd, seed)


# The kernels have no output that is a cache, so that mostly they are left out.
@interpreted
@pytest.mark.parametrize(
    "backend", [WRITER, pytest.param(INTERPRETED, marks=pytest.mark.sweep)], ids=lambda it: it.name
)
@pytest.mark.parametrize("decode_only", [True, False])
def test_only_the_tokens_of_the_step_are_written(decode_only, backend, capfd):
    config = AttentionConfig(num_heads=2, num_kv_heads=1, head_size=64, scale=0.1)
    batch = RaggedBatch(
        query_starts=jnp.array([0, 1, 1] if decode_only else [0, 1, 4], jnp.int32),
        context_lens=jnp.array([3, 0] if decode_only else [3, 17], jnp.int32),
        block_tables=jnp.array([[1, 99], [3, 2]], jnp.int32),
        num_decodes=jnp.int32(1),
        block_size=16,
        decode_only=decode_only,
    )
    num_tokens = 2 if decode_only else 8
    spec = backend.cache_shape(config, num_blocks=5, block_size=16, dtype=jnp.bfloat16)
    before = np.random.default_rng(0).normal(size=spec.shape).astype(spec.dtype)
    q, k, v = (jnp.ones((num_tokens, heads, 64), jnp.bfloat16) for heads in (2, 1, 1))

    @jax.jit
    def write(q, k, v, cache):
        prepared = backend.prepare(batch, (config,), num_tokens=num_tokens)
        return backend.attend(q, k, v, cache, batch, prepared, config=config)

    _, after = write(q, k, v, before)
    changed = (np.asarray(after) != before).any(axis=(1, 2, 4))  # [blocks, tokens]
    written = np.zeros((5, 16), bool)
    written[1, 2] = True  # position 2 of row 0
    if not decode_only:
        written[3, 14:] = written[2, 0] = True  # positions 14 to 16 of row 1
    np.testing.assert_array_equal(changed, written)
    assert_no_races(capfd)


@dataclass(frozen=True)
class OnlyArranges(MosaicGpuBackend):
    """Returns what the kernels that attend would get."""

    def _attend(self, grouped, queries, initial, *_):
        return grouped, queries, initial


@interpreted
@pytest.mark.parametrize("decode_only", [True, False])
def test_heads_are_arranged_as_by_xla(decode_only, capfd):
    backend = OnlyArranges(name="only_arranges", num_workers=2, interpret=True)
    config = AttentionConfig(num_heads=8, num_kv_heads=2, head_size=64, scale=0.1)
    batch = RaggedBatch(
        query_starts=jnp.array([0, 1, 2, 2], jnp.int32),
        context_lens=jnp.array([3, 20, 0], jnp.int32),
        block_tables=jnp.array([[1, 99], [3, 2], [4, 99]], jnp.int32),
        num_decodes=jnp.int32(2),
        num_short=jnp.int32(0),
        block_size=16,
        decode_only=decode_only,
    )
    rng = np.random.default_rng(0)
    spec = backend.cache_shape(config, num_blocks=5, block_size=16, dtype=jnp.bfloat16)
    pages, heads = (
        jnp.asarray(rng.normal(size=shape).astype(jnp.bfloat16))
        for shape in (spec.shape, (3, 12, 64))
    )
    assert backend.takes_heads(config, None)

    @jax.jit
    def both(heads, pages):
        prepared = backend.prepare(batch, (config,), num_tokens=3)
        q, k, v = jnp.split(heads, [8, 10], axis=1)
        return (
            backend.attend_heads(heads, None, pages, batch, prepared, config=config),
            backend.attend(q, k, v, pages, batch, prepared, config=config),
        )

    def without_arbitrary(arranged, cache):
        """Of what is beside a group's heads, of tokens beyond the last and of outputs that are
        written anew, the kernels take any."""
        grouped, queries, out = arranged
        return grouped[:, :, :4], None if queries is None else queries[:3], out[2:], cache

    ours, expected = (without_arbitrary(*one) for one in both(heads, pages))
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
    assert_no_races(capfd)


@interpreted
@pytest.mark.parametrize("chip", ["h100", "h200"])
def test_hopper_is_served(chip):
    BACKEND.check(CONFIG, LIMITS, dtype=jnp.bfloat16, chip=CHIPS[chip])


@interpreted
@pytest.mark.parametrize(
    ("config", "limits", "dtype", "message"),
    [
        ({}, {}, "float32", "set --dtype bfloat16 or float16, or --attention-backend xla"),
        ({"head_size": 72}, {}, "bfloat16", "head sizes .* not 72; set --attention-backend xla"),
        ({"num_heads": 64, "num_kv_heads": 1}, {}, "bfloat16", "32 query heads per kv head"),
        ({"v_head_size": 64}, {}, "bfloat16", "values have the size of keys, 128, not 64"),
        ({"chunk": 8}, {}, "bfloat16", "does not cut contexts into chunks .*backend xla"),
        ({}, {"block_size": 8}, "bfloat16", "set --block-size"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(config, limits, dtype, message):
    config, limits = dataclasses.replace(CONFIG, **config), dataclasses.replace(LIMITS, **limits)
    with pytest.raises(ValueError, match=message):
        BACKEND.check(config, limits, dtype=dtype, chip=CHIPS["h200"])


@pytest.mark.parametrize(
    "chip",
    [
        CHIPS["cpu"],
        CHIPS["v5e"],
        dataclasses.replace(CHIPS["h200"], name="a100", compute_capability=(8, 0)),
        dataclasses.replace(CHIPS["h200"], name="b200", compute_capability=(10, 0)),
        dataclasses.replace(CHIPS["h200"], name="mi300", compute_capability=None),
    ],
    ids=lambda chip: chip.name,
)
def test_other_chips_are_refused(chip):
    with pytest.raises(ValueError, match=f"not on {chip.name}; set --attention-backend xla"):
        BACKEND.check(CONFIG, LIMITS, dtype=jnp.bfloat16, chip=chip)


@pytest.mark.skipif(not no_mosaic, reason="this JAX is new enough")
def test_an_older_jax_is_refused():
    with pytest.raises(ValueError, match="needs JAX 0.11.2 .* set --attention-backend xla"):
        BACKEND.check(CONFIG, LIMITS, dtype=jnp.bfloat16, chip=CHIPS["h200"])


@pytest.mark.parametrize(("version", "expected"), [((0, 11, 2), 0), ((0, 12, 0, 1), 1)])
def test_a_jax_that_takes_registers_away_is_told_of_once(version, expected, monkeypatch, caplog):
    gpu._warn_once.cache_clear()
    # As in a process that has an engine, where what the kernels log does not reach the root.
    monkeypatch.setattr(gpu.logger, "handlers", [caplog.handler])
    monkeypatch.setattr(gpu.logger, "propagate", False)
    monkeypatch.setattr(jax, "__version_info__", version)
    for backend in (INTERPRETED, BACKEND, BACKEND):
        backend.check(CONFIG, LIMITS, dtype=jnp.bfloat16, chip=CHIPS["h200"])
    assert len([text for text in caplog.messages if "too few registers" in text]) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", [*CASES, *SMALL_CASES, *SWEPT_CASES], ids=lambda case: case.name)
def test_a_hopper_gpu_is_right(case, dtype, gpu, capfd):
    limits = BatchLimits(
        num_tokens=case.num_tokens,
        num_rows=case.num_rows,
        max_blocks=case.max_blocks,
        block_size=case.block_size,
    )
    try:
        BACKEND.check(case.config, limits, dtype=dtype, chip=gpu)
    except ValueError as refusal:
        pytest.skip(str(refusal))
    assert_correct(BACKEND, case, dtype, capfd)

"""Named batches that every backend must compute correctly, and the correct results.

A case runs as in an engine. First the history of its rows is computed, in steps of the same shape,
so that one program is compiled: the backend itself fills the cache, so the cases assume no layout.
Decodes, which would need many steps, have a history of mixed steps. Then the case's step runs.
Everything that no token may read is NaN or garbage from the start: pages of no row, the rest of a
row's last page, keys and values of padding, the unused end of block tables. The expected results
are computed in float64 from unpaged keys and values.
"""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.common import cdiv, round_up
from jaxllm_kernels.ragged_paged_attention.api import (
    SHORT_ROW,
    AttentionBackend,
    AttentionConfig,
    KVScales,
    RaggedBatch,
)

# The largest relative error (of norms) of a backend.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}

_OUT_OF_RANGE = (-1, -(2**31), 2**31 - 1, 10**6)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step. A row is (tokens in this step, context length after it); decodes come first."""

    name: str
    rows: tuple[tuple[int, int], ...]
    # The shape of the program; entries without rows are padding.
    num_tokens: int = 64
    num_rows: int = 8
    max_blocks: int = 12
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    v_head_size: int | None = None
    sliding_window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    kv_dtype: Literal["int8", "float8_e4m3fn"] | None = None
    decode_only: bool = False
    # Rows given to the program as decodes; None for all that can be decodes.
    num_decodes: int | None = None
    # Tokens that see each other, also later ones: a row, and the positions of the first and after
    # the last.
    spans: tuple[tuple[int, int, int], ...] = ()
    # Whether short rows after the decodes are given as such.
    has_short: bool = True
    # Values of block table entries that must not be followed; some are valid blocks.
    unused_entries: tuple[int, ...] = (*_OUT_OF_RANGE, 0, 1)
    is_slow: bool = False

    @property
    def is_usual(self) -> bool:
        """Whether kernels for accelerators have to support it."""
        return self.chunk is None and self.v_head_size is None

    @property
    def config(self) -> AttentionConfig:
        return AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            # Large enough that weights differ clearly.
            scale=2 * self.head_size**-0.5,
            v_head_size=self.v_head_size,
            sliding_window=self.sliding_window,
            chunk=self.chunk,
            soft_cap=self.soft_cap,
            kv_dtype=self.kv_dtype,
        )


_DECODES = ((1, 1), (1, 16), (1, 17), (1, 100), (1, 33))
_PREFILLS = ((20, 20), (7, 40), (16, 32), (9, 9))
# Decodes, short rows and a chunk. Some begin a context, or end or begin at the border of a page.
# One lies over three tiles of eight tokens of the flat batch.
_SHORT = ((1, 40), (2, 2), (2, 17), (3, 48), (8, 72), (8, 8), (5, 101), (20, 30))
# Short rows over borders of 16 and 32 tokens of their contexts, and of 8 and 16 of the flat batch.
_BORDERS = ((1, 33), (5, 5), (3, 34), (7, 100), (6, 22), (4, 65), (7, 19), (9, 9))
_MIXED = ((1, 5), (1, 64), (1, 130), (30, 61), (17, 17), (3, 90))

CASES = (
    Case(name="mixed", rows=_MIXED),
    Case(name="decodes", rows=_DECODES, num_tokens=8, decode_only=True),
    Case(name="decodes_in_a_mixed_program", rows=_DECODES),
    Case(name="prefills", rows=_PREFILLS),
    Case(name="short_rows", rows=_SHORT),
    Case(name="short_rows_as_chunks", rows=_SHORT, has_short=False),
    Case(name="only_short_rows", rows=((2, 30), (4, 4), (4, 66), (8, 90)), num_tokens=32),
    Case(name="short_rows_and_no_others", rows=((1, 9), (6, 70), (7, 33)), num_tokens=16),
    Case(name="short_rows_of_one_head", rows=_SHORT, num_kv_heads=1, head_size=128),
    Case(name="short_rows_in_a_window", rows=_SHORT, sliding_window=6),
    Case(
        name="everything_with_short_rows",
        rows=_SHORT,
        num_heads=6,
        head_size=128,
        sliding_window=21,
        soft_cap=3.0,
        has_sinks=True,
    ),
    Case(name="short_rows_with_int8_kv", rows=_SHORT, block_size=32, kv_dtype="int8"),
    Case(name="short_rows_over_borders", rows=_BORDERS),
    Case(
        name="short_rows_over_borders_with_fp8_kv",
        rows=_BORDERS,
        num_heads=8,
        num_kv_heads=1,
        head_size=128,
        block_size=32,
        has_sinks=True,
        kv_dtype="float8_e4m3fn",
    ),
    Case(name="one_token", rows=((1, 1),)),
    Case(name="all_padding", rows=()),
    Case(name="all_padding_decodes", rows=(), num_tokens=8, decode_only=True),
    Case(name="no_padding", rows=((1, 64), (1, 7), (62, 62)), num_rows=3),
    Case(name="rows_without_tokens", rows=((1, 9), (10, 30), (0, 0), (12, 12), (0, 0), (5, 100))),
    Case(name="ends_on_a_page_border", rows=((1, 16), (1, 48), (16, 16), (8, 64))),
    Case(name="starts_on_a_page_border", rows=((1, 17), (1, 33), (16, 32), (5, 69))),
    Case(name="chunk_longer_than_a_page", rows=((60, 60),)),
    Case(name="chunk_longer_than_a_page_over_history", rows=((50, 90),)),
    # Kernels on hardware refuse such small blocks; the emulated TPU kernel accepts them.
    Case(name="chunk_longer_than_a_page_of_8", rows=((60, 60),), block_size=8),
    Case(name="chunk_longer_than_a_page_of_8_over_history", rows=((50, 90),), block_size=8),
    Case(name="out_of_range_block_ids", rows=_MIXED, unused_entries=_OUT_OF_RANGE),
    Case(
        name="out_of_range_block_ids_before_a_window",
        rows=_MIXED,
        sliding_window=20,
        unused_entries=_OUT_OF_RANGE,
    ),
    Case(name="more_rows_than_tokens", rows=((1, 20), (1, 3), (5, 12)), num_tokens=8, num_rows=16),
    Case(name="mha", rows=_MIXED, num_kv_heads=4),
    Case(name="mqa", rows=_MIXED, num_kv_heads=1),
    Case(name="gqa_3", rows=_MIXED, num_heads=6),
    Case(name="gqa_8", rows=_MIXED, num_heads=16),
    Case(name="head_size_80", rows=_MIXED, head_size=80),
    Case(name="head_size_96", rows=_MIXED, head_size=96),
    Case(name="head_size_128", rows=_MIXED, head_size=128),
    Case(name="head_size_256", rows=_MIXED, head_size=256),
    Case(name="block_size_32", rows=_MIXED, block_size=32),
    Case(name="block_size_64", rows=_MIXED, block_size=64),
    Case(name="block_size_128", rows=_MIXED, block_size=128),
    Case(name="soft_cap", rows=_MIXED, soft_cap=1.5),
    Case(name="sinks", rows=_MIXED, has_sinks=True),
    Case(name="window_of_one", rows=_MIXED, sliding_window=1),
    Case(name="window_below_a_page", rows=_MIXED, sliding_window=5),
    Case(name="window_of_pages", rows=_MIXED, sliding_window=48),
    Case(name="window_decodes", rows=_DECODES, num_tokens=8, decode_only=True, sliding_window=20),
    Case(name="everything", rows=_MIXED, sliding_window=21, soft_cap=3.0, has_sinks=True),
    Case(name="chunks_below_a_page", rows=_MIXED, chunk=5),
    Case(name="chunks_of_pages", rows=_MIXED, chunk=48),
    Case(name="chunks_over_borders_of_pages", rows=_SHORT, chunk=40, unused_entries=_OUT_OF_RANGE),
    Case(name="chunks_of_decodes", rows=_DECODES, num_tokens=8, decode_only=True, chunk=20),
    Case(name="smaller_values", rows=_MIXED, head_size=96, v_head_size=64),
    Case(name="larger_values", rows=_DECODES, num_tokens=8, decode_only=True, v_head_size=128),
    Case(
        name="everything_with_smaller_values",
        rows=_SHORT,
        v_head_size=32,
        chunk=21,
        soft_cap=3.0,
        has_sinks=True,
    ),
    Case(name="int8_kv", rows=_MIXED, block_size=32, kv_dtype="int8"),
    Case(name="fp8_kv", rows=_MIXED, block_size=32, kv_dtype="float8_e4m3fn"),
    Case(
        name="int8_kv_decodes",
        rows=_DECODES,
        num_tokens=8,
        decode_only=True,
        block_size=32,
        kv_dtype="int8",
    ),
    Case(
        name="everything_with_fp8_kv",
        rows=_MIXED,
        block_size=32,
        sliding_window=21,
        soft_cap=3.0,
        has_sinks=True,
        kv_dtype="float8_e4m3fn",
    ),
    Case(
        name="thousands_of_tokens_beside_tens",
        rows=((1, 3000), *[(1, 10)] * 49, (10, 2500)),
        num_tokens=512,
        num_rows=64,
        max_blocks=200,
        num_heads=2,
        num_kv_heads=1,
    ),
    Case(
        name="thirty_thousand_tokens_beside_tens",
        rows=((1, 30_000), *[(1, 10)] * 50),
        num_tokens=2048,
        num_rows=64,
        max_blocks=1900,
        num_heads=2,
        num_kv_heads=1,
        is_slow=True,
    ),
)


class CaseResult(NamedTuple):
    """A backend's results for a case's step."""

    out: np.ndarray  # float64 [tokens of the step, N, H]
    expected: np.ndarray  # float64 [tokens of the step, N, H]
    all_finite: bool  # including the outputs of padding

    @property
    def error(self) -> float:
        """Relative error."""
        norm = np.linalg.norm(self.expected)
        return float(np.linalg.norm(self.out - self.expected) / norm) if norm else 0.0


class _Row(NamedTuple):
    """A request: its whole context, unpaged, and its blocks in the backend's cache."""

    number: int  # of the case's rows
    q: np.ndarray  # [context, N, H]
    k: np.ndarray  # [context, K, H]
    v: np.ndarray  # [context, K, V]
    blocks: np.ndarray  # int32 [blocks of the context]


class _Span(NamedTuple):
    """The tokens of a row that a step computes."""

    row: _Row
    start: int
    end: int

    def last_seen(self, case: Case) -> np.ndarray:
        """The position of the last token that each of them sees."""
        positions = np.arange(self.start, self.end)
        last = positions.copy()
        for row, start, end in case.spans:
            if row == self.row.number:
                last[(start <= positions) & (positions < end)] = min(end, self.end) - 1
        return last


def run_case(
    backend: AttentionBackend,
    case: Case,
    dtype: DTypeLike,
    *,
    seed: int = 0,
    history_backend: AttentionBackend | None = None,
) -> CaseResult:
    """Compute a case's history and then its step with a backend.

    Of the history only the cache is used. Where attention is slow, because it is emulated, another
    backend can compute the history: one that writes the same cache and attends to nothing.
    """
    rng = np.random.default_rng(seed)
    # Some blocks belong to no row. The number is rounded so that similar cases share programs.
    num_blocks = round_up(1 + sum(cdiv(context, case.block_size) for _, context in case.rows), 64)
    free = rng.permutation(num_blocks).astype(np.int32)
    history, step = [], []
    for length, context in case.rows:
        owned, free = np.split(free, [cdiv(context, case.block_size)])
        q, k, v = (
            rng.normal(size=(context, *shape)).astype(dtype) for shape in _shapes(case).values()
        )
        row = _Row(len(step), q, k, v, owned)
        history.append(_Span(row, 0, context - length))
        step.append(_Span(row, context - length, context))
    sinks = jnp.asarray(rng.normal(size=case.num_heads), jnp.float32) if case.has_sinks else None

    spec = backend.cache_shape(
        case.config, num_blocks=num_blocks, block_size=case.block_size, dtype=dtype
    )
    # All bits set is NaN in every floating type.
    poison = np.full(spec.size * spec.dtype.itemsize, 0xFF, np.uint8)
    cache = jnp.asarray(poison.view(spec.dtype).reshape(spec.shape))

    scales = _draw_scales(case, rng)
    run = functools.partial(_run, sinks=sinks, kv_scales=scales, config=case.config)
    before = dataclasses.replace(case, decode_only=False, num_decodes=0)
    if case.decode_only:
        before = dataclasses.replace(before, num_tokens=max(case.num_tokens, 64))
    for spans in _split(history, before):
        operands = _pack(spans, before, dtype, rng)
        _, cache = run(*operands, cache, backend=history_backend or backend)
    out, _ = run(*_pack(step, case, dtype, rng), cache, backend=backend)

    out = np.asarray(out).astype(np.float64)
    expected = [_attend_float64(span, case, sinks, scales) for span in step]
    total = sum(map(len, expected))
    return CaseResult(
        out[:total],
        np.concatenate([np.zeros((0, *out.shape[1:])), *expected]),
        bool(np.isfinite(out).all()),
    )


@functools.partial(jax.jit, static_argnames=("backend", "config"), donate_argnames="cache")
def _run(q, k, v, batch, cache, *, sinks, kv_scales, backend, config):
    prepared = backend.prepare(batch, (config,), num_tokens=q.shape[0])
    return backend.attend(
        q, k, v, cache, batch, prepared, config=config, sinks=sinks, kv_scales=kv_scales
    )


def _shapes(case: Case) -> dict[str, tuple[int, int]]:
    """Of a token's queries, keys and values."""
    config = case.config
    return {
        "q": (case.num_heads, config.head_size),
        "k": (case.num_kv_heads, config.head_size),
        "v": (case.num_kv_heads, config.value_size),
    }


def _draw_scales(case: Case, rng: np.random.Generator) -> KVScales | None:
    """Scales with which normal variables fill the dtype; int8 clips a few."""
    if case.kv_dtype is None:
        return None
    unit = 0.03 if case.kv_dtype == "int8" else 1.0
    k, v = unit * rng.uniform(0.7, 1.4, size=(2, case.num_kv_heads)).astype(np.float32)
    return KVScales(jnp.asarray(k), jnp.asarray(v))


def _as_cached(x: np.ndarray, scale: jax.Array, case: Case) -> np.ndarray:
    """The values [T, K, H] that an 8-bit cache stores for x, as float64."""
    scales = np.asarray(scale)[:, None]
    x = x.astype(np.float32) / scales
    if case.kv_dtype == "int8":
        x = np.rint(x).clip(-127, 127)
    else:
        x = x.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    return x.astype(np.float64) * scales


def _split(spans: list[_Span], case: Case) -> list[list[_Span]]:
    """Cut spans into steps that fit a program of the case's shape."""
    steps, room = [[]], case.num_tokens
    for span in spans:
        start = span.start
        while start < span.end:
            if room == 0:
                steps, room = [*steps, []], case.num_tokens
            end = min(span.end, start + room)
            steps[-1].append(span._replace(start=start, end=end))
            start, room = end, room - (end - start)
    return [step for step in steps if step]


def _pack(spans: list[_Span], case: Case, dtype: DTypeLike, rng: np.random.Generator):
    """Make the operands (q, k, v, batch) of a step."""
    lengths = np.zeros(case.num_rows, np.int32)
    contexts = np.zeros(case.num_rows, np.int32)
    garbage = np.array(case.unused_entries, np.int32)
    tables = rng.choice(garbage, size=(case.num_rows, case.max_blocks))
    for i, (row, start, end) in enumerate(spans):
        lengths[i], contexts[i] = end - start, end
        first = max(start - case.sliding_window + 1, 0) if case.sliding_window else 0
        first = start // case.chunk * case.chunk if case.chunk else first
        used = slice(first // case.block_size, cdiv(end, case.block_size))
        tables[i, used] = row.blocks[used]

    num_decodes = case.num_decodes
    if num_decodes is None:
        num_decodes = int((lengths == 1).cumprod().sum())
    others = lengths[num_decodes:]
    num_short = int(((others > 1) & (others <= SHORT_ROW)).cumprod().sum()) if case.has_short else 0
    batch = RaggedBatch(
        query_starts=jnp.asarray(np.concatenate([[0], lengths.cumsum()]), jnp.int32),
        context_lens=jnp.asarray(contexts),
        block_tables=jnp.asarray(tables),
        num_decodes=jnp.asarray(num_decodes, jnp.int32),
        num_short=jnp.asarray(num_short, jnp.int32),
        block_size=case.block_size,
        decode_only=case.decode_only,
    )
    if case.spans:
        padding = rng.integers(0, case.num_tokens, size=case.num_tokens - lengths.sum())
        last_seen = np.concatenate([*(span.last_seen(case) for span in spans), padding])
        batch = dataclasses.replace(batch, last_seen=jnp.asarray(last_seen, jnp.int32))
    operands = []
    for name, shape in _shapes(case).items():
        tokens = [getattr(row, name)[start:end] for row, start, end in spans]
        shape = (case.num_tokens - lengths.sum(), *shape)
        # Of padding only the queries may be read: their outputs must be finite.
        padding = rng.normal(size=shape) if name == "q" else np.full(shape, np.nan)
        operands.append(jnp.asarray(np.concatenate([*tokens, padding.astype(dtype)]), dtype))
    return *operands, batch


def _attend_float64(
    span: _Span, case: Case, sinks: jax.Array | None, kv_scales: KVScales | None
) -> np.ndarray:
    """The expected results for the tokens of a row: [tokens, N, H]."""
    config = case.config
    group_size = case.num_heads // case.num_kv_heads
    q = span.row.q[span.start : span.end].astype(np.float64)
    k, v = span.row.k.astype(np.float64), span.row.v.astype(np.float64)
    if kv_scales is not None:
        k, v = _as_cached(k, kv_scales.k, case), _as_cached(v, kv_scales.v, case)
    k, v = (np.repeat(x, group_size, axis=1) for x in (k, v))
    scores = config.scale * np.einsum("tnh,cnh->ntc", q, k)
    if config.soft_cap is not None:
        scores = config.soft_cap * np.tanh(scores / config.soft_cap)
    distance = np.arange(span.start, span.end)[:, None] - np.arange(len(k))
    seen = np.arange(len(k)) <= span.last_seen(case)[:, None]
    if config.sliding_window is not None:
        seen &= distance < config.sliding_window
    if config.chunk is not None:
        chunks = np.arange(len(k)) // config.chunk
        seen &= chunks[span.start : span.end, None] == chunks
    weights = np.exp(np.where(seen, scores, -np.inf))
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(np.asarray(sinks, np.float64))[:, None, None]
    return np.einsum("ntc,cnh->tnh", weights / total, v)

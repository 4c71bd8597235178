"""Batches in which tokens see later ones of their row, as those of an image do."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxllm_kernels.ragged_paged_attention.api import (
    AttentionConfig,
    RaggedBatch,
    SeesAhead,
    get_backend,
)
from jaxllm_kernels.ragged_paged_attention.native import NativeBackend

from tests.kernels.test_ragged_paged_attention import BATCHED, SMALL

BLOCK, BLOCKS_PER_ROW, NUM_TOKENS = 16, 6, 64
# Tokens in this step, context length after it, and spans of its positions that see each other.
# Spans begin and end at borders of pages and tiles, and beside each other.
ROWS = (
    (1, 20, ()),
    (30, 61, ((35, 50), (50, 58))),
    (17, 17, ((0, 16),)),
    (12, 90, ((78, 90),)),
)
SPANS_OF_HISTORY = {61: ((3, 29),)}


@pytest.fixture
def backend(request, library):
    known = {"small tiles": SMALL, "many at once": BATCHED, "native": NativeBackend(library)}
    return known.get(request.param) or get_backend(request.param)


def on_backends(*always):
    """Run always are these windows with these backends."""
    return pytest.mark.parametrize(
        ("backend", "window"),
        [
            pytest.param(name, window, marks=[pytest.mark.sweep] * ((name, window) not in always))
            for name in ("reference", "xla", "small tiles", "many at once", "native")
            for window in (None, 20)
        ],
        indirect=["backend"],
    )


def last_seen(rows):
    """Of each token of a step."""
    its = np.zeros(NUM_TOKENS, np.int32)
    first = 0
    for count, length, spans in rows:
        positions = np.arange(length - count, length)
        for start, end in spans:
            positions[(positions >= start) & (positions < end)] = end - 1
        its[first : first + count] = positions
        first += count
    return its


def batch_of(rows, num_decodes):
    starts = np.cumsum([0, *(count for count, _, _ in rows)])
    return RaggedBatch(
        query_starts=jnp.array(starts, jnp.int32),
        context_lens=jnp.array([length if count else 0 for count, length, _ in rows], jnp.int32),
        block_tables=jnp.arange(len(rows) * BLOCKS_PER_ROW, dtype=jnp.int32).reshape(len(rows), -1),
        num_decodes=jnp.int32(num_decodes),
        last_seen=jnp.array(last_seen(rows)),
        block_size=BLOCK,
        decode_only=False,
    )


def expected(q, keys, values, positions, last, config):
    """In float64, of one row."""
    at = np.arange(len(keys))
    seen = at <= last[:, None]
    if config.sliding_window is not None:
        seen &= at > positions[:, None] - config.sliding_window
    group = config.num_heads // config.num_kv_heads
    keys, values = (np.repeat(np.float64(x), group, axis=1) for x in (keys, values))
    scores = config.scale * np.einsum("tnh,snh->nts", np.float64(q), keys)
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("nts,snh->tnh", weights, values)


@on_backends(
    ("reference", 20), ("xla", 20), ("many at once", None), ("native", None), ("native", 20)
)
def test_tokens_of_a_span_see_all_of_it(backend, window):
    assert isinstance(backend, SeesAhead)
    config = AttentionConfig(
        num_heads=4, num_kv_heads=2, head_size=32, scale=0.4, sliding_window=window
    )
    rng = np.random.default_rng(0)
    whole = {
        length: [rng.standard_normal((length, heads, 32)).astype(np.float32) for heads in (4, 2, 2)]
        for _, length, _ in ROWS
    }
    cache = backend.cache_shape(
        config, num_blocks=len(ROWS) * BLOCKS_PER_ROW, block_size=BLOCK, dtype=jnp.float32
    )
    cache = jnp.zeros(cache.shape, cache.dtype)
    # What is in the cache before the step, in steps of the same shape.
    done = [0] * len(ROWS)
    before = [length - count for count, length, _ in ROWS]
    while done != before:
        step, room = [], NUM_TOKENS
        for row, (_, length, _) in enumerate(ROWS):
            count = min(before[row] - done[row], room)
            step.append((count, done[row] + count, SPANS_OF_HISTORY.get(length, ())))
            done[row] += count
            room -= count
        _, cache = attend(backend, step, whole, cache, config, num_decodes=0)
    out, _ = attend(backend, ROWS, whole, cache, config, num_decodes=1)
    first = 0
    for count, length, spans in ROWS:
        q, keys, values = whole[length]
        positions = np.arange(length - count, length)
        last = last_seen([(count, length, spans)])[:count]
        right = expected(q[positions], keys, values, positions, last, config)
        np.testing.assert_allclose(out[first : first + count], right, rtol=2e-5, atol=2e-5)
        first += count


def attend(backend, rows, whole, cache, config, *, num_decodes):
    parts = [
        [x[length - count : length] for x in whole[of]]
        for (count, length, _), (_, of, _) in zip(rows, ROWS, strict=True)
    ]
    q, k, v = (np.concatenate([part[i] for part in parts]) for i in range(3))
    q, k, v = (
        jnp.array(np.pad(x, ((0, NUM_TOKENS - len(x)), (0, 0), (0, 0)), constant_values=np.nan))
        for x in (q, k, v)
    )
    batch = batch_of(rows, num_decodes)
    prepared = backend.prepare(batch, (config,), num_tokens=NUM_TOKENS)
    return backend.attend(q, k, v, cache, batch, prepared, config=config)

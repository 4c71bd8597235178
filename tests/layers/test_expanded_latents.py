"""Latent attention with keys and values of heads: which rows have it, and what it gives them."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxllm_kernels.mla.api import get_latent_backend
from jaxllm_kernels.ragged_paged_attention.api import RaggedBatch
from jaxllm_kernels.ragged_self_attention.xla import XlaSelfAttention

from jaxllm.layers.context import StepContext
from jaxllm.layers.expanded_latents import ExpandedForm
from jaxllm.layers.latent_attention import LatentAttentionSpec
from jaxllm.layers.norm import RMSNormSpec
from jaxllm.layers.rope import RopeConfig, rotary

BLOCK_SIZE, MAX_BLOCKS, HIDDEN = 8, 12, 48
FEWEST = 9
SPEC = LatentAttentionSpec(
    num_heads=4,
    latent_size=32,
    nope_size=12,
    rope_size=8,
    v_head_size=20,
    q_latent_size=24,
    scale=0.4,
    rope=RopeConfig(size=8, theta=1e4),
    norm=RMSNormSpec(eps=1e-6),
)
# Rows are (tokens of the step, context after it). Decodes, chunks behind a context, whole prompts
# of the fewest tokens and of one less, in this order and in between.
ROWS = ((1, 30), (1, 1), (12, 40), (FEWEST, FEWEST), (FEWEST - 1, FEWEST - 1), (20, 33), (25, 25))
FRESH = (3, 6)


class Spoiling(NamedTuple):
    """An op whose outputs are no numbers."""

    name: str = "spoiling"

    def __call__(self, q, k, v, query_starts, config, query_ends=None):
        return jnp.full((*q.shape[:2], v.shape[2]), jnp.nan, q.dtype)


class Counting(NamedTuple):
    """An op that counts its calls."""

    calls: tuple = ()
    name: str = "counting"

    def __call__(self, q, k, v, query_starts, config, query_ends=None):
        jax.debug.callback(COUNTED.append, 1)
        return XlaSelfAttention()(q, k, v, query_starts, config, query_ends)


COUNTED: list[int] = []


def weights_of(layer):
    """Random weights, and the parts of norms near one."""
    graph, state = nnx.split(layer)
    rng = np.random.default_rng(3)
    leaves, tree = jax.tree.flatten(state)
    drawn = [
        rng.normal(size=x.shape) * 0.15 if x.ndim > 1 else 1 + 0.1 * rng.normal(size=x.shape)
        for x in leaves
    ]
    return graph, jax.tree.unflatten(
        tree, [jnp.asarray(x, y.dtype) for x, y in zip(drawn, leaves, strict=True)]
    )


def make_batch(rows, *, decode_only=False):
    lengths = np.asarray([length for length, _ in rows])
    tables = np.arange(1, 1 + len(rows) * MAX_BLOCKS).reshape(len(rows), MAX_BLOCKS)
    return RaggedBatch(
        query_starts=jnp.asarray(np.concatenate([[0], lengths.cumsum()]), jnp.int32),
        context_lens=jnp.asarray([context for _, context in rows], jnp.int32),
        block_tables=jnp.asarray(tables, jnp.int32),
        num_decodes=jnp.asarray(int((lengths == 1).cumprod().sum()), jnp.int32),
        block_size=BLOCK_SIZE,
        decode_only=decode_only,
    )


@functools.cache
def run(expanded, rows=ROWS, dtype="float32", num_tokens=96, *, seed=1, decode_only=False):
    """The layer's outputs for a step, and its cache, in which contexts before it are random."""
    spec = dataclasses.replace(SPEC, expanded=expanded)
    graph, weights = weights_of(spec.make(HIDDEN, num_shards=1, dtype=dtype))
    layer = nnx.merge(graph, weights)
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=(num_tokens, HIDDEN)), dtype)
    backend = get_latent_backend("xla")
    shape = backend.cache_shape(
        layer.config, num_blocks=1 + len(rows) * MAX_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype
    )
    before = jnp.asarray(rng.normal(size=shape.shape), jnp.float32).astype(dtype)
    cache = before if shape.dtype == dtype else before.view(shape.dtype)
    batch = make_batch(rows, decode_only=decode_only)

    @jax.jit
    def step(x, cache, batch):
        context = StepContext.prepare(
            {None: batch}, (layer.config,), num_tokens=num_tokens, backend=backend
        )
        starts = batch.query_starts
        row = jnp.searchsorted(starts[1:], jnp.arange(num_tokens), side="right")
        row = jnp.minimum(row, len(starts) - 2)
        positions = batch.context_lens[row] - starts[row + 1] + jnp.arange(num_tokens)
        assert SPEC.rope is not None
        context = dataclasses.replace(
            context, positions=positions, rotary=rotary(SPEC.rope, positions)
        )
        return layer(x, cache, context)

    out, cache = step(x, cache, batch)
    return np.asarray(out, np.float64)[: sum(length for length, _ in rows)], np.asarray(cache)


def form(op=None, fewest=FEWEST):
    return ExpandedForm(op=op or XlaSelfAttention(tile=16), fewest_tokens=fewest)


def tokens_of(rows):
    """Which tokens of ROWS are in these rows."""
    starts = np.cumsum([0, *(length for length, _ in ROWS)])
    inside = np.zeros(starts[-1], bool)
    for row in rows:
        inside[starts[row] : starts[row + 1]] = True
    return inside


def test_expanded_is_absorbed():
    (absorbed, cache), (expanded, same_cache) = run(None), run(form())
    assert np.abs(absorbed).max() > 1
    np.testing.assert_allclose(expanded, absorbed, atol=1e-5, rtol=0)
    assert (absorbed != expanded)[tokens_of(FRESH)].any(), "nothing was expanded"
    np.testing.assert_array_equal(same_cache, cache)


def test_rows_that_are_fresh_are_expanded_and_no_others():
    spoilt, _ = run(form(Spoiling()))
    expected, _ = run(None)
    np.testing.assert_array_equal(np.isnan(spoilt).all(axis=1), tokens_of(FRESH))
    others = ~tokens_of(FRESH)
    np.testing.assert_allclose(spoilt[others], expected[others], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "rows",
    [((40, 40),), ((FEWEST, FEWEST), (30, 30)), ((0, 0), (20, 20), (0, 0))],
    ids=["one", "two", "beside padding"],
)
def test_fresh_rows_alone(rows):
    expanded, _ = run(form(), rows)
    np.testing.assert_allclose(expanded, run(None, rows)[0], atol=1e-5, rtol=0)


def test_a_prompt_in_chunks_is_the_whole_prompt():
    whole, _ = run(form(), ((40, 40),))
    first, cache = run(form(), ((30, 30),))
    absorbed, of_absorbed = run(None, ((30, 30),))
    np.testing.assert_allclose(first, whole[:30], atol=1e-5, rtol=0)
    np.testing.assert_allclose(absorbed, whole[:30], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(cache, of_absorbed)


def test_bfloat16_is_no_less_exact():
    exact, _ = run(None)
    errors = {
        name: np.linalg.norm((run(how, dtype="bfloat16")[0] - exact)[tokens_of(FRESH)])
        for name, how in (("absorbed", None), ("expanded", form()))
    }
    assert errors["expanded"] <= errors["absorbed"]


def test_a_step_without_fresh_rows_makes_no_keys():
    COUNTED.clear()
    run(form(Counting()), ROWS[:3], seed=2)
    jax.effects_barrier()
    assert not COUNTED
    run(form(Counting()))
    jax.effects_barrier()
    assert COUNTED


def test_programs_without_fresh_rows_have_no_second_form():
    """Where all rows are decodes, or there are too few tokens for a fresh row."""
    decodes = ((1, 30), (1, 7))
    for options in ({"num_tokens": 2, "decode_only": True}, {"num_tokens": FEWEST - 1}):
        run(form(op=refuse), decodes, **options)


def refuse(*_):
    raise AssertionError("the program has an op for fresh rows")

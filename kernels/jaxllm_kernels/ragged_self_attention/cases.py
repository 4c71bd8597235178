"""Batches that every implementation must compute, and the results in float64."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig, SelfAttentionOp

# The largest error of an output, of values that are about one.
TOLERANCES = {"float32": 2e-6, "bfloat16": 3e-2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of these lengths in a batch of so many tokens."""

    lengths: tuple[int, ...]
    num_tokens: int
    num_empty_rows: int = 2
    num_heads: int = 4
    num_kv_heads: int = 4
    head_size: int = 16
    value_size: int | None = None  # None: head_size
    reach: int | None = None
    causal: bool = False
    left_out: tuple[int, ...] = ()  # the indices of rows that the op is not to compute


CASES = {
    "one row": Case(lengths=(64,), num_tokens=64),
    "short rows": Case(lengths=(3, 1, 7, 5, 2, 9, 4), num_tokens=64),
    "longer than a tile": Case(lengths=(5, 150, 1, 80), num_tokens=256),
    "ends of tiles": Case(lengths=(63, 1, 64, 65, 63), num_tokens=256),
    "no even number of tokens": Case(lengths=(17, 60, 13), num_tokens=93),
    "nothing but padding": Case(lengths=(), num_tokens=16),
    "grouped heads": Case(lengths=(40, 9, 70), num_tokens=128, num_heads=6, num_kv_heads=2),
    "a reach": Case(lengths=(5, 150, 33), num_tokens=256, reach=8),
    "a long reach": Case(lengths=(140, 20), num_tokens=160, reach=100),
    "long rows and no whole vectors": Case(
        lengths=(5, 300, 1), num_tokens=310, num_heads=6, num_kv_heads=3, head_size=20, reach=150
    ),
    "causal": Case(lengths=(5, 150, 1, 80), num_tokens=256, causal=True),
    "causal with a reach": Case(lengths=(140, 20), num_tokens=160, reach=60, causal=True),
    "other sizes of values": Case(lengths=(40, 90), num_tokens=140, head_size=24, value_size=16),
    "causal, grouped, and larger values": Case(
        lengths=(300, 30), num_tokens=350, num_heads=6, num_kv_heads=2, value_size=40, causal=True
    ),
    # Decodes and a chunk, whole prompts, and another chunk: as in a step of latent attention.
    "rows left out": Case(
        lengths=(1, 1, 1, 20, 150, 70, 33, 40),
        num_tokens=350,
        causal=True,
        left_out=(0, 1, 2, 3, 6),
    ),
    "all rows left out": Case(lengths=(5, 30), num_tokens=64, causal=True, left_out=(0, 1)),
}


def error(op: SelfAttentionOp, case: Case, dtype: DTypeLike = "float32") -> float:
    """The largest error of an implementation. What belongs to no row is very large, so that it
    shows if it is mixed in."""
    random = np.random.default_rng(3)
    value_size = case.value_size or case.head_size
    q, k, v = (
        jnp.asarray(random.normal(size=(case.num_tokens, *heads)), dtype)
        for heads in (
            (case.num_heads, case.head_size),
            (case.num_kv_heads, case.head_size),
            (case.num_kv_heads, value_size),
        )
    )
    num_real = sum(case.lengths)
    k, v = k.at[num_real:].set(100.0), v.at[num_real:].set(1000.0)
    lengths = (*case.lengths, *[0] * case.num_empty_rows)
    starts = np.cumsum((0, *lengths)).astype(np.int32)
    ends = starts[1:].copy()
    for row in case.left_out:
        ends[row] = starts[row]
        left_out = slice(starts[row], starts[row + 1])
        k, v = k.at[left_out].set(100.0), v.at[left_out].set(1000.0)
    config = SelfAttentionConfig(
        scale=case.head_size**-0.5 * 2, reach=case.reach, causal=case.causal
    )
    query_ends = jnp.asarray(ends) if case.left_out else None
    out = np.asarray(op(q, k, v, jnp.asarray(starts), config, query_ends), np.float64)
    assert out.shape == (case.num_tokens, case.num_heads, value_size)
    assert np.isfinite(out).all(), "padding has outputs that are no numbers"
    found = 0.0
    for first, end in zip(starts[:-1], ends, strict=True):
        its = [np.asarray(x[first:end], np.float64) for x in (q, k, v)]
        exact = _expected(its[0], its[1], its[2], config)
        found = max(found, float(np.abs(out[first:end] - exact).max(initial=0.0)))
    return found


def _expected(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, config: SelfAttentionConfig
) -> np.ndarray:
    """The outputs of one row."""
    groups = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x, groups, axis=1) for x in (k, v))
    scores = config.scale * np.einsum("qnh,knh->nqk", q, k)
    places = np.arange(len(q))
    if config.reach is not None:
        scores = np.where(abs(places[:, None] - places) <= config.reach, scores, -np.inf)
    if config.causal:
        scores = np.where(places <= places[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e9))
    return np.einsum("nqk,knh->qnh", weights / weights.sum(axis=-1, keepdims=True), v)

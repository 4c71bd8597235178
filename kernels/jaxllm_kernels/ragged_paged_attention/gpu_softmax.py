"""Scores in the GPU kernels: in units of log2(e), so that weights are powers of two."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig, KVScales

LOG2_E = math.log2(math.e)

# The score of a key that is not seen. It is finite, because a block may have only such keys for a
# query: their weights are one. As soon as the query sees a key, 2 ** (UNSEEN - score) = 0
# multiplies them.
UNSEEN = -1e30


class HeadScalars(NamedTuple):
    """Scalars per head that the kernels need."""

    score_factors: jax.Array  # float32 [K]: see `to_scores`
    value_scales: jax.Array  # float32 [K]: factors of the cached values
    sinks: jax.Array  # float32 [N]: scores of a key without value; UNSEEN if there is none


def head_scalars(
    config: AttentionConfig, sinks: jax.Array | None, kv_scales: KVScales | None
) -> HeadScalars:
    """The scalars of a layer."""
    factor = config.scale * LOG2_E if config.soft_cap is None else config.scale / config.soft_cap
    factors = jnp.full(config.num_kv_heads, factor, jnp.float32)
    if sinks is None:
        sinks = jnp.full(config.num_heads, UNSEEN, jnp.float32)
    else:
        sinks = sinks.astype(jnp.float32) * LOG2_E
    if kv_scales is None:
        return HeadScalars(factors, jnp.ones_like(factors), sinks)
    return HeadScalars(factors * kv_scales.k, kv_scales.v.astype(jnp.float32), sinks)


def to_scores(products, factor, config: AttentionConfig):
    """Scores from products of queries and keys, with the factor of their kv head."""
    scores = products * factor
    if config.soft_cap is not None:
        scores = config.soft_cap * LOG2_E * jnp.tanh(scores)
    return scores


def to_unscaled_scores(products, factor, config: AttentionConfig):
    """Scores that must still be multiplied by the returned factor.

    The largest score is the largest product times a positive factor. So the products need not be
    multiplied before their maximum is known, and after that the multiplication is part of an
    addition.
    """
    if config.soft_cap is None and config.scale > 0:
        return products, factor
    return to_scores(products, factor, config), 1.0

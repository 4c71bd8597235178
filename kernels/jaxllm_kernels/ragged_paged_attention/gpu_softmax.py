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

# In place of the product of a query and a key that is not seen, where products still have a factor.
# It is a power of two, so that multiplying it is exact, also where a multiplication and a
# subtraction are one instruction. If the largest score of a query that sees nothing were rounded,
# `product * factor - largest` could be 1e22 in place of 0, and the weight infinite.
UNSEEN_PRODUCT = -(2.0**100)
# The least factor for which such products are scores that are never seen. Keys whose scale is below
# it, such as zero, have scores of zero with it, too.
LEAST_FACTOR = 2.0**-80


class HeadScalars(NamedTuple):
    """Numbers of a layer's heads that are not the same in all of them; None if they are. XLA would
    launch something to write equal numbers to memory."""

    key_scales: jax.Array | None  # float32 [K]: factors of the cached keys
    value_scales: jax.Array | None  # float32 [K]: factors of the cached values
    sinks: jax.Array | None  # float32 [N]: scores of a key without value


def head_scalars(sinks: jax.Array | None, kv_scales: KVScales | None) -> HeadScalars:
    """The scalars of a layer."""
    if sinks is not None:
        sinks = sinks.astype(jnp.float32) * LOG2_E
    if kv_scales is None:
        return HeadScalars(None, None, sinks)
    k, v = (scales.astype(jnp.float32) for scales in kv_scales)
    return HeadScalars(k, v, sinks)


def score_factor(scales, head, config: AttentionConfig):
    """The factor of the products of queries and keys of a kv head: see `to_scores`."""
    factor = config.scale * LOG2_E if config.soft_cap is None else config.scale / config.soft_cap
    factor = jnp.float32(factor) * of_head(scales, head, 1.0)
    return factor if scales is None or config.scale <= 0 else jnp.maximum(factor, LEAST_FACTOR)


def of_head(scalars, head, otherwise: float):
    """The number of a head, or the one of all heads."""
    return jnp.float32(otherwise) if scalars is None else scalars[head]


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

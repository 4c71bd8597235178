"""Scores as the GPU kernels keep them: in units of log2(e), so that weights are powers of two."""

import math

import jax.numpy as jnp

from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig

LOG2_E = math.log2(math.e)

# The score of a key that is not seen. It is finite, so that a query may meet such keys alone: their
# weights, all one, are multiplied by 2 ** (UNSEEN - score) = 0 as soon as it sees a key.
UNSEEN = -1e30


def product_factor(config: AttentionConfig) -> float:
    """What `to_scores` multiplies products of queries and keys by."""
    if config.soft_cap is not None:
        return config.scale / config.soft_cap
    return config.scale * LOG2_E


def to_scores(products, factor, config: AttentionConfig):
    """Scores of products of queries and keys."""
    scores = products * factor
    if config.soft_cap is not None:
        scores = config.soft_cap * LOG2_E * jnp.tanh(scores)
    return scores

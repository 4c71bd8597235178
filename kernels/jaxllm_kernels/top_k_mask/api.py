"""The contract of top-k, top-p and min-p, for every implementation."""

import jax

from jaxllm_kernels.top_k_mask import xla


def top_k_top_p_min_p_mask(
    logits: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """Set to -inf the logits, f32 [R, V], of tokens that a row may not sample.

    Let p be a token's probability divided by that of its row's most likely token. The filters apply
    in this order, each to the tokens that the filters before it keep:

    1. `min_p` f32 [R]: tokens with p >= min_p; 0 keeps all.
    2. `top_k` i32 [R]: the k most likely tokens; 0 or less keeps all.
    3. `top_p` f32 [R]: the fewest most likely tokens whose share of the remaining probability is at
       least top_p; 1 keeps all.

    Tokens with equal p, as float32, are kept or cut together; a tie at the cut is kept. The most
    likely token always stays. Rows of -inf are returned unchanged.
    """
    return xla.top_k_top_p_min_p_mask(logits, top_k, top_p, min_p)

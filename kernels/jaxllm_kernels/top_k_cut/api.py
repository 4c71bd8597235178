"""The contract of top-k, top-p and min-p, for every implementation."""

from collections.abc import Callable

import jax

from jaxllm_kernels.top_k_cut import xla


def top_k_top_p_min_p_cut(
    p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    row_sums: Callable[[jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Return the lowest p of a token that a row may sample, f32 [R].

    `p` f32 [R, V] is each token's probability divided by that of its row's most likely token. The
    filters apply in this order, each to the tokens that the filters before it keep:

    1. `min_p` f32 [R]: tokens with p >= min_p; 0 keeps all.
    2. `top_k` i32 [R]: the k most likely tokens; 0 or less keeps all.
    3. `top_p` f32 [R]: the fewest most likely tokens whose share of the remaining probability is at
       least top_p; 1 keeps all.

    So tokens with equal p are kept or cut together, and a tie at the cut is kept. The result is at
    most 1: the most likely token always stays. It may lie below the lowest p that is kept, but not
    below the highest that is cut.

    `row_sums` adds up rows, f32 [R, V]; None: XLA does.
    """
    return xla.top_k_top_p_min_p_cut(p, top_k, top_p, min_p, row_sums=row_sums)

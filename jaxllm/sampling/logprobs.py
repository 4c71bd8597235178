"""Log probabilities of sampled tokens and of prompt tokens, for requests that ask for them.

A step computes up to MAX_STEP_LOGPROBS of them per position, and only as many as some row needs.
Each value is a logit minus the row's normaliser. Neither depends on the number of logprobs, so a
row's values are the same to the last bit whatever other rows ask for.
"""

import jax
import jax.numpy as jnp
from jaxllm_kernels.sampler.api import LogprobOutput

from jaxllm.sampling.choose import MostLikely
from jaxllm.sampling.layout import Layout
from jaxllm.sampling.top_k import top_k


def token_logprobs(
    logits: jax.Array,
    targets: jax.Array,
    best: MostLikely,
    *,
    k: int,
    wants_more: jax.Array,
    layout: Layout,
) -> LogprobOutput:
    """Compute logprobs of the targets, i32 [n], and of the best tokens, under logits f32 [n, V].

    If `wants_more`, bool [], is set: of the k best tokens. `best` is their first.
    """
    n = len(targets)

    def count_better() -> jax.Array:
        return jnp.sum(logits > target_logits, axis=1, dtype=jnp.int32)

    def the_best() -> tuple[jax.Array, jax.Array]:
        others = ((0, 0), (0, k - 1))
        return jnp.pad(best.logits[:, None], others), jnp.pad(best.tokens[:, None], others)

    target_logits = jnp.take_along_axis(logits, targets[:, None], axis=1)
    largest = best.logits[:, None]
    normaliser = largest + jnp.log(layout.row_sums(jnp.exp(logits - largest))[:, None])
    # Nothing needs to be counted if every target is the best token, as in greedy rows.
    better = jax.lax.cond(
        jnp.all(targets == best.tokens), lambda: jnp.zeros(n, jnp.int32), count_better
    )
    if k > 1:
        top = jax.lax.cond(wants_more, lambda: top_k(logits, k, layout.max_top_k_columns), the_best)
    else:
        top = best.logits[:, None][:, :k], best.tokens[:, None][:, :k]
    return LogprobOutput(
        token_ids=jnp.concatenate([targets[:, None], top[1]], axis=1),
        logprobs=jnp.concatenate([target_logits, top[0]], axis=1) - normaliser,
        ranks=1 + better,
        normalisers=normaliser[:, 0],
    )


def no_logprobs(n: int, k: int, zero: jax.Array | int = 0) -> LogprobOutput:
    """The output of positions without logprobs: zeros of the same shapes, made of `zero`, i32 [n]
    or a number."""
    zeros = jnp.broadcast_to(jnp.asarray(zero, jnp.int32), (n,))
    table = jnp.broadcast_to(zeros[:, None], (n, 1 + k))
    return LogprobOutput(
        token_ids=table,
        logprobs=table.astype(jnp.float32),
        ranks=zeros,
        normalisers=zeros.astype(jnp.float32),
    )

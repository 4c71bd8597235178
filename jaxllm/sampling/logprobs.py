"""Log probabilities of tokens, for those who ask: of sampled tokens and of prompt tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.sampling.top_k import top_k


class LogprobOutput(NamedTuple):
    """Logprobs at n positions: column 0 is the token that is there, then the k most likely ones,
    best first."""

    token_ids: jax.Array  # i32 [n, 1 + k]
    logprobs: jax.Array  # f32 [n, 1 + k]
    ranks: jax.Array  # i32 [n]: 1 + the number of tokens more likely than the one in column 0


def token_logprobs(logits: jax.Array, targets: jax.Array, k: int) -> LogprobOutput:
    """Logprobs of the targets, i32 [n], and of the k best tokens under logits, f32 [n, V]."""
    target_logits = jnp.take_along_axis(logits, targets[:, None], axis=1)
    best_logits, best_ids = top_k(logits, k)
    normaliser = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    return LogprobOutput(
        token_ids=jnp.concatenate([targets[:, None], best_ids], axis=1),
        logprobs=jnp.concatenate([target_logits, best_logits], axis=1) - normaliser,
        ranks=1 + jnp.sum(logits > target_logits, axis=1, dtype=jnp.int32),
    )


def no_logprobs(n: int, k: int) -> LogprobOutput:
    """What stands where nobody asked: zeros of the same shapes."""
    return LogprobOutput(
        token_ids=jnp.zeros((n, 1 + k), jnp.int32),
        logprobs=jnp.zeros((n, 1 + k), jnp.float32),
        ranks=jnp.zeros(n, jnp.int32),
    )

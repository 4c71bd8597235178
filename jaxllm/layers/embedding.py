"""The token embedding and, with the same layout, the output head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxllm.layers.linear import matmul


class Embedding(nnx.Module):
    """One row of D per token of the vocabulary; an output head is the same, used the other way."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: DTypeLike):
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Look up [T] token ids: [T, D]. Ids are checked at the door; those of padding are
        clipped, because an out-of-range row would be NaN."""
        with jax.named_scope("embedding"):
            return self.weight[...].at[token_ids].get(mode="clip")

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Score every token of the vocabulary: [n, D] to float32 [n, V]."""
        with jax.named_scope("logits"):
            return matmul(hidden, self.weight[...])

"""The token embedding and, with the same layout, the output head."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.common import round_up

from jaxllm.layers.linear import Product

_LANES = 128


class Embedding(Product):
    """One row of D per token of the vocabulary; an output head is the same, used the other way."""

    def __init__(self, vocab_size: int, hidden_size: int, *, num_shards: int = 1, dtype: DTypeLike):
        """Make the table. Where it is cut, rows of padding make every shard as large as the others
        and a multiple of what a vector register holds."""
        self.vocab_size = vocab_size
        rows = vocab_size if num_shards == 1 else round_up(vocab_size, _LANES * num_shards)
        self.weight = nnx.Param(
            jnp.zeros((rows, hidden_size), dtype),
            axes=("vocab", "hidden"),
            rows=vocab_size,
        )

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Look up [T] token ids: [T, D]. Those of requests are checked at the door; padding's are
        beyond all, and become zeros, which products may skip."""
        with jax.named_scope("embedding"):
            return self.weight[...].at[token_ids].get(mode="fill", fill_value=0)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Score every token of the vocabulary: [n, D] to float32 [n, rows]; padding is -inf."""
        with jax.named_scope("logits"):
            logits = self.matmul(hidden, self.weight[...])
            rows = logits.shape[1]
            if rows == self.vocab_size:
                return logits
            return jnp.where(jnp.arange(rows) < self.vocab_size, logits, -jnp.inf)

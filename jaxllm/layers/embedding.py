"""The token embedding and, with the same layout, the output head; learned positions."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.common import round_up

from jaxllm.layers.linear import Product

_LANES = 128
# How much longer padding may make a row.
_MOST_PADDED = 1.125
# The position of padding, beyond every table.
NOWHERE = jnp.iinfo(jnp.int32).max


class Embedding(Product):
    """A table [V, D]: the embedding looks rows up, the output head multiplies by all of them."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        only_looks_up: bool = False,
        num_shards: int = 1,
        dtype: DTypeLike,
    ):
        """Make the table. A sharded table is padded: all shards have the same number of rows, a
        multiple of a vector register's lanes. On TPUs XLA keeps a table of so many rows by columns
        if the row is no multiple of the lanes, since that pads less, and copies all of it before it
        looks rows up. So the rows of a table that only looks up are padded, too. The rows of a
        tied table are not: the head would read the padding in each step. A table on one device is
        not padded."""
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        rows, columns = vocab_size, hidden_size
        if num_shards > 1:
            rows = round_up(vocab_size, _LANES * num_shards)
            if only_looks_up and (padded := round_up(columns, _LANES)) <= _MOST_PADDED * columns:
                columns = padded
        self.weight = nnx.Param(
            jnp.zeros((rows, columns), dtype),
            axes=("vocab", "hidden"),
            rows=vocab_size,
            columns=hidden_size,
        )
        # Only a head has it.
        self.bias = (
            nnx.Param(jnp.zeros(rows, dtype), axes=("vocab",), rows=vocab_size) if bias else None
        )

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """Look up token ids [T]; return [T, D].

        Ids of requests are validated when they arrive. Ids of padding are out of range and become
        zeros, which matmuls may skip.
        """
        with jax.named_scope("embedding"):
            rows = self.weight[...].at[token_ids].get(mode="fill", fill_value=0)
            return rows[:, : self.hidden_size]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Compute float32 logits [n, rows] from [n, D]; padding columns are -inf."""
        with jax.named_scope("logits"):
            logits = self.product(hidden)
            if self.bias is not None:
                logits = logits + self.bias[...].astype(jnp.float32)
            rows = logits.shape[1]
            if rows == self.vocab_size:
                return logits
            return jnp.where(jnp.arange(rows) < self.vocab_size, logits, -jnp.inf)

    def product(self, hidden: jax.Array) -> jax.Array:
        """Multiply by all rows, in float32."""
        return self.matmul(hidden, self.weight[...])


class Positions(nnx.Module):
    """A table [positions, D] of learned positions."""

    def __init__(self, num_positions: int, hidden_size: int, *, dtype: DTypeLike):
        table = jnp.zeros((num_positions, hidden_size), dtype)
        self.weight = nnx.Param(table, axes=(None, "hidden"))

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Look up positions [T]; return [T, D]. The row of NOWHERE is zero."""
        return self.weight[...].at[positions].get(mode="fill", fill_value=0)

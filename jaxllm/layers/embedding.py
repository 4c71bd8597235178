"""The token embedding and, with the same layout, the output head; learned positions."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxllm_kernels.common import round_up

from jaxllm.layers.linear import Product

# Of a vector register of a TPU.
_LANES = 128
# The position of padding, beyond every table.
NOWHERE = jnp.iinfo(jnp.int32).max


class Embedding(Product):
    """A table [V, D]: the embedding looks rows up, the output head multiplies by all of them."""

    looks_up: bool = False

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        bias: bool = False,
        looks_up: bool = True,
        num_shards: int = 1,
        dtype: DTypeLike,
    ):
        """Make the table. A sharded table has rows of padding, so that all shards have the same
        number of rows, a multiple of a vector register's lanes. A head that looks nothing up has
        `looks_up=False`: `pad_tables` leaves it as it is."""
        self.vocab_size, self.hidden_size, self.looks_up = vocab_size, hidden_size, looks_up
        rows = round_up(vocab_size, _LANES * num_shards) if num_shards > 1 else vocab_size
        self.weight = nnx.Param(
            jnp.zeros((rows, hidden_size), dtype), axes=("vocab", "hidden"), rows=vocab_size
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
            return _rows(self.weight[...], token_ids, self.hidden_size)

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
        table = self.weight[...]
        if padding := table.shape[1] - hidden.shape[1]:
            hidden = jnp.pad(hidden, ((0, 0), (0, padding)))
        return self.matmul(hidden, table)


class Positions(nnx.Module):
    """A table [positions, D] of learned positions."""

    def __init__(self, num_positions: int, hidden_size: int, *, dtype: DTypeLike):
        self.hidden_size = hidden_size
        table = jnp.zeros((num_positions, hidden_size), dtype)
        self.weight = nnx.Param(table, axes=(None, "hidden"))

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Look up positions [T]; return [T, D]. The row of NOWHERE is zero."""
        return _rows(self.weight[...], positions, self.hidden_size)


def pad_tables(model: Any, multiple: int) -> None:
    """Pad the rows of an abstract model's tables that are looked up to a multiple of elements."""
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Positions) or (isinstance(module, Embedding) and module.looks_up):
            weight: Any = module.weight  # of an abstract model: a shape in place of an array
            num_rows, size = weight.shape
            if padded := -size % multiple:
                shape = (num_rows, size + padded)
                weight.set_raw_value(jax.ShapeDtypeStruct(shape, weight.dtype))
                weight.set_metadata(columns=size)


def _rows(table: jax.Array, indices: jax.Array, size: int) -> jax.Array:
    """Rows of a table without their padding. Indices beyond the table become zeros."""
    return table.at[indices].get(mode="fill", fill_value=0)[..., :size]

"""Pooling on the device: from the hidden states of a step's tokens to vectors."""

from collections.abc import Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.base import Model, PoolingModel
from jaxllm.plan.buckets import Bucket
from jaxllm.pooler_config import SeqPooling
from jaxllm.pooling.slice import TOKENS
from jaxllm.scheduler.schedule import Slice


class PooledRows(NamedTuple):
    """The vectors of rows, of which those count that end a prompt, and what the slots keep."""

    vectors: jax.Array  # f32 [R, K]
    sums: jax.Array | None  # f32 [S, D]


def pool_rows(
    how: SeqPooling,
    model: PoolingModel,
    hidden: jax.Array,
    *,
    token_rows: jax.Array,
    query_starts: jax.Array,
    context_lens: jax.Array,
    slots: jax.Array,
    sums: jax.Array | None,
) -> PooledRows:
    """Pool the hidden states [T, D] of each row's prompt as far as it is computed.

    A prompt may come in several steps. So for LAST nothing is kept, but for MEAN the sum of each
    slot's hidden states so far, and for CLS its first one, [S, D].
    """
    num_rows = len(slots)
    num_new = jnp.diff(query_starts)
    if how == "LAST":
        last = jnp.where(num_new > 0, query_starts[1:] - 1, len(hidden))
        pooled = hidden.at[last].get(mode="fill", fill_value=0).astype(jnp.float32)
        return PooledRows(model.project(pooled), None)
    assert sums is not None, how
    begins = (context_lens == num_new)[:, None]
    before = sums.at[slots].get(mode="fill", fill_value=0)
    if how == "CLS":
        first = jnp.where(num_new > 0, query_starts[:-1], len(hidden))
        here = hidden.at[first].get(mode="fill", fill_value=0).astype(jnp.float32)
        kept = jnp.where(begins, here, before)
        pooled = kept
    else:
        # Tokens of padding belong to no row. A row's sum goes on from that of the step before, so
        # that it has the same bits however the prompt is cut.
        is_real = jnp.arange(len(hidden)) < query_starts[-1]
        kept = (
            jnp.where(begins, 0.0, before)
            .at[jnp.where(is_real, token_rows, num_rows)]
            .add(hidden.astype(jnp.float32), mode="drop", indices_are_sorted=True)
        )
        pooled = kept / jnp.maximum(context_lens, 1)[:, None]
    sums = sums.at[slots].set(kept, mode="drop")
    return PooledRows(model.project(pooled), sums)


class TokenPooling:
    """A vector for each token, in the steps in which a request wants them."""

    name = TOKENS

    def fields(self, bucket: Bucket) -> dict[str, tuple[int, ...]]:
        return {"wanted": ()}

    def pack(self, fields: Mapping[str, np.ndarray], its: Slice | None) -> None:
        fields["wanted"][...] = bool(its)

    def compute(
        self, fields: Mapping[str, jax.Array], model: Model, hidden: jax.Array
    ) -> dict[str, jax.Array]:
        def compute() -> jax.Array:
            return cast(PoolingModel, model).project(hidden.astype(jnp.float32))

        def skip() -> jax.Array:
            shape = jax.eval_shape(compute)
            return jnp.zeros(shape.shape, shape.dtype)

        return {"vectors": jax.lax.cond(fields["wanted"] != 0, compute, skip)}

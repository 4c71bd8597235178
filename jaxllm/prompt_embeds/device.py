"""Embeddings of prompts on the device: where a step finds them, and what writes them there."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxllm.models.base import Model
from jaxllm.plan.buckets import Bucket
from jaxllm.prompt_embeds.slice import NAME, NO_ROW
from jaxllm.scheduler.schedule import Slice


class PromptEmbeds:
    """The feature's device half. The step takes the rows of its tokens, and there is nothing to
    compute behind the model. Only programs for mixed steps have it."""

    name = NAME

    def fields(self, bucket: Bucket) -> dict[str, tuple[int, ...]]:
        return {} if bucket.decode_only else {"rows": (bucket.num_tokens,)}

    def pack(self, fields: Mapping[str, np.ndarray], its: Slice | None) -> None:
        if "rows" in fields:
            fields["rows"][...] = NO_ROW
            if its is not None:
                fields["rows"][: len(its["rows"])] = its["rows"]

    def compute(
        self, fields: Mapping[str, jax.Array], model: Model, hidden: jax.Array
    ) -> dict[str, jax.Array]:
        return {}


def in_writes(
    data: np.ndarray, dtype: DTypeLike, first_row: int, size: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Divide the embeddings of a step, u8 [n, bytes], into arrays of `size` of them, each with its
    first row in the pool. The last one has zeros at its end."""
    embeddings = data.view(np.dtype(dtype))
    for start in range(0, len(embeddings), size):
        piece = embeddings[start : start + size]
        if len(piece) < size:
            padding = np.zeros((size - len(piece), piece.shape[1]), piece.dtype)
            piece = np.concatenate([piece, padding])
        yield first_row + start, piece


def write(pool: jax.Array, row: jax.Array, embeddings: jax.Array) -> jax.Array:
    """Put embeddings [n, D] into rows of the pool. What layers would add behind them is zero."""
    wide = jnp.pad(embeddings, ((0, 0), (0, pool.shape[1] - embeddings.shape[1])))
    return jax.lax.dynamic_update_slice(pool, wide, (row, jnp.int32(0)))

"""An example of a user's backend: plain jax.numpy, dense and simple.

Every token computes scores for all slots of its row's block table, so it is for short contexts.
Engines find it as attention_backend="user_backend:DenseBackend".
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxllm_kernels.ragged_paged_attention.api import check_common, locate_tokens

LONGEST_CONTEXT = 1024


class Prepared(NamedTuple):
    """The values that all layers of a step share."""

    rows: jax.Array  # int32 [T]
    positions: jax.Array  # int32 [T]; zero for padding
    blocks: jax.Array  # int32 [T]: where a token is written; out of range for padding


@dataclass(frozen=True)
class DenseBackend:
    """Attention of all tokens to all slots of their rows."""

    name: str = "dense"

    @property
    def cache_head_axis(self):
        return 3

    def tuned_for(self, chip):
        return self  # nothing to tune

    def check(self, config, limits, *, dtype, chip):
        check_common(config, limits, dtype=dtype)
        if config.kv_dtype is not None:
            raise ValueError(f"no {config.kv_dtype} caches; set --attention-backend to xla")
        context = limits.max_blocks * limits.block_size
        if context > LONGEST_CONTEXT:
            raise ValueError(
                f"contexts of {context} tokens are above {LONGEST_CONTEXT}; lower --max-model-len"
            )

    def cache_shape(self, config, *, num_blocks, block_size, dtype):
        heads = config.num_kv_heads, config.head_size
        return jax.ShapeDtypeStruct((num_blocks, block_size, 2, *heads), jnp.dtype(dtype))

    def prepare(self, batch, configs, *, num_tokens):
        rows, positions = locate_tokens(batch, num_tokens)
        is_padding, positions = positions < 0, jnp.maximum(positions, 0)
        blocks = batch.block_tables[rows, positions // batch.block_size]
        # A scatter drops an index past the end; a negative one would count from the end.
        blocks = jnp.where(is_padding, jnp.iinfo(jnp.int32).max, blocks)
        return Prepared(rows, positions, blocks)

    def attend(self, q, k, v, cache, batch, prepared, *, config, sinks=None, kv_scales=None):
        rows, positions, blocks = prepared
        new = jnp.stack([k, v], axis=1)  # [T, 2, K, H]
        cache = cache.at[blocks, positions % batch.block_size].set(new, mode="drop")

        # All slots of every row. Slots past the context, or before the windows of all tokens, may
        # hold NaN, which a weight of zero would not remove.
        pages = cache[jnp.clip(batch.block_tables, 0, len(cache) - 1)]  # [R, P, block, 2, K, H]
        num_rows, max_blocks = batch.block_tables.shape
        room = pages.reshape(num_rows, max_blocks * batch.block_size, *pages.shape[3:])
        places = jnp.arange(room.shape[1])
        window = config.sliding_window or room.shape[1] + 1
        firsts = batch.context_lens - jnp.diff(batch.query_starts)
        is_kept = places < batch.context_lens[:, None]
        is_kept &= places > firsts[:, None] - window
        room = jnp.where(is_kept[:, :, None, None, None], room, 0).astype(jnp.float32)

        keys, values = jnp.moveaxis(room[rows], 2, 0)  # [T, C, K, H]
        grouped = q.reshape(len(q), config.num_kv_heads, -1, config.head_size).astype(jnp.float32)
        scores = config.scale * jnp.einsum("tkgh,tckh->tkgc", grouped, keys, precision="highest")
        if config.soft_cap is not None:
            scores = config.soft_cap * jnp.tanh(scores / config.soft_cap)
        # A token of padding sees the first slot, so that its output is finite, too.
        is_seen = places <= positions[:, None]
        is_seen &= places > positions[:, None] - window
        scores = jnp.where(is_seen[:, None, None], scores, -jnp.inf)
        if sinks is not None:
            sinks = jnp.broadcast_to(
                sinks.astype(jnp.float32).reshape(1, config.num_kv_heads, -1, 1),
                (*scores.shape[:3], 1),
            )
            scores = jnp.concatenate([scores, sinks], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : room.shape[1]]
        out = jnp.einsum("tkgc,tckh->tkgh", weights, values, precision="highest")
        return out.reshape(q.shape).astype(q.dtype), cache


def make_dense():
    """A factory: `attention_backend` may name a function instead of a class."""
    return DenseBackend(name="dense_made")


dense = DenseBackend(name="dense_object")

"""The work of self-attention on Hopper GPUs: tiles of queries, and the blocks that they see.

Tiles are cut out of the flat batch, whatever rows they have queries of. So queries, keys and values
begin at places that the copy engine takes, and short rows share a tile. The rows of a tile lie side
by side, so what it sees is one stretch of the batch, which is cut into blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm_kernels.common import cdiv, round_up
from jaxllm_kernels.ragged_paged_attention.gpu_tuning import (
    GROUP_TOKENS,
    NUM_GROUPS,
    SHARED_BYTES,
)
from jaxllm_kernels.ragged_paged_attention.gpu_worklist import cdiv_array
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
from jaxllm_kernels.ragged_self_attention.xla import locate_places, seen_places

TILE_TOKENS = NUM_GROUPS * GROUP_TOKENS
# Copies of tokens begin at a multiple of this.
ALIGNMENT = 8
# What a matrix instruction adds up at once.
_HEAD_UNIT = 16
_RESERVED_BYTES = 3 * 1024  # of shared memory: barriers
_MOST_STAGES = 4
# The largest size of which a block of 128 keys, and scores of as many, leave room for two blocks.
_LARGEST_OF_128 = 128
_LARGEST = 256


class Sizes(NamedTuple):
    """How the kernel computes heads of a size."""

    head_size: int  # with columns of zeros, which are computed as well
    block_tokens: int  # keys of a block
    num_stages: int  # blocks that are ready for the matrix instructions, or in flight
    num_slots: int  # tiles whose queries or outputs are in shared memory


def choose_sizes(head_size: int) -> Sizes:
    """The sizes for heads in 16 bits. Raises ValueError if the kernel does not compute them."""
    if not (0 < head_size <= _LARGEST_OF_128 or head_size == _LARGEST):
        raise ValueError(
            f"heads of {head_size} are neither of {_LARGEST} nor up to {_LARGEST_OF_128}"
        )
    size = round_up(head_size, _HEAD_UNIT)
    block_tokens, num_slots = (128, 2) if size <= _LARGEST_OF_128 else (64, 1)
    block_bytes = 2 * block_tokens * size * 2  # of keys and values
    room = SHARED_BYTES - _RESERVED_BYTES - num_slots * TILE_TOKENS * size * 2
    return Sizes(size, block_tokens, min(_MOST_STAGES, room // block_bytes), num_slots)


class Tiles(NamedTuple):
    """Tiles of queries, those with most keys first. Blocks are counted from the tile's first."""

    token: jax.Array  # int32 [W]: the first query
    start: jax.Array  # int32 [W]: the first key
    num_blocks: jax.Array  # int32 [W]
    # Of each warpgroup, int32 [W, 2]. Its queries see nothing of the blocks before `begin`, and
    # from `stop` on. All of them see all keys of the blocks from `whole` to `masked`.
    begin: jax.Array
    whole: jax.Array
    masked: jax.Array
    stop: jax.Array
    # Of each query, int32 [W * TILE_TOKENS]: the first key, and the one behind the last.
    first: jax.Array
    end: jax.Array


def cut_tiles(
    query_starts: jax.Array,
    query_ends: jax.Array | None,
    num_tokens: int,
    config: SelfAttentionConfig,
    block_tokens: int,
) -> Tiles:
    """Cut a batch of so many tokens into tiles."""
    num_tiles = cdiv(num_tokens, TILE_TOKENS)
    padded = num_tiles * TILE_TOKENS
    first, end = seen_places(query_starts, query_ends, padded, config)
    is_real, _ = locate_places(query_starts, query_ends, padded)
    first, end = jnp.where(is_real, first, padded), jnp.where(is_real, end, 0)
    firsts, ends = (x.reshape(num_tiles, NUM_GROUPS, GROUP_TOKENS) for x in (first, end))
    low, high = firsts.min(axis=2), ends.max(axis=2)
    start = low.min(axis=1)
    start = start - start % ALIGNMENT
    # Not below zero, where a tile has no query of a row.
    num_blocks = jnp.maximum(cdiv_array(high.max(axis=1) - start, block_tokens), 0)
    of_group, most = start[:, None], num_blocks[:, None]
    begin = jnp.clip((low - of_group) // block_tokens, 0, most)
    stop = jnp.clip(cdiv_array(high - of_group, block_tokens), begin, most)
    whole = jnp.clip(cdiv_array(firsts.max(axis=2) - of_group, block_tokens), begin, stop)
    masked = jnp.clip((ends.min(axis=2) - of_group) // block_tokens, whole, stop)
    order = jnp.argsort(-num_blocks)
    return Tiles(
        token=order.astype(jnp.int32) * TILE_TOKENS,
        start=start[order],
        num_blocks=num_blocks[order],
        begin=begin[order],
        whole=whole[order],
        masked=masked[order],
        stop=stop[order],
        first=first,
        end=end,
    )

"""Tiles of rows for the products on GPUs: which expert each has, and where each choice's row is.

All of this is plain JAX. A step pays for its launches in every layer, so numbers are counted by
comparing all pairs: a GPU does that in one launch, and takes several for a sort or a running sum.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxllm_kernels.common import cdiv

# Tokens whose choices are compared with each other; earlier groups are only counted.
_GROUP_TOKENS = 128
# The most pairs that are compared to find the choices of rows, in place of a scatter.
_MOST_PAIRS = 1 << 22


class Tiles(NamedTuple):
    """Where the rows of all choices are. Tiles have R rows."""

    experts: jax.Array  # int32 [tiles]: the expert of each tile
    ends: jax.Array  # int32: the last number is that of all tiles; the rest have no expert
    rows: jax.Array  # int32 [T, k]: the row of each choice; arbitrary if it has no expert here
    choices: jax.Array | None  # int32 [tiles * R]: the choice of each row; 0 beside them


def share_rows(chosen: jax.Array, num_experts: int, tile_rows: int) -> Tiles:
    """A tile for each chosen expert; row t is token t. There are at most R tokens."""
    num_tokens, num_choices = chosen.shape
    token = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    if num_tokens == 1:
        # Its choices are all different. Those that are no expert's here have tiles without one.
        rows = jnp.arange(num_choices, dtype=jnp.int32)[None] * tile_rows
        return Tiles(chosen[0], jnp.full(1, num_choices, jnp.int32), rows, None)
    is_chosen = _count(chosen.reshape(-1), num_experts) > 0
    ends = _running_sum(is_chosen.astype(jnp.int32))
    tile = ends.at[chosen].get(mode="clip") - 1
    most = min(num_experts, chosen.size)
    return Tiles(_experts_of_tiles(ends, most), ends, tile * tile_rows + token, None)


def sort_rows(chosen: jax.Array, num_experts: int, tile_rows: int) -> Tiles:
    """The rows of each expert, in the order of tokens; they begin at a tile."""
    num_tokens, num_choices = chosen.shape
    num_groups = cdiv(num_tokens, _GROUP_TOKENS)
    size = num_tokens * num_choices
    group_size = min(num_tokens, _GROUP_TOKENS) * num_choices
    padded = jnp.pad(
        chosen.reshape(-1), (0, num_groups * group_size - size), constant_values=num_experts
    )
    groups = padded.reshape(num_groups, group_size)
    counts = _count(groups, num_experts)  # [groups, E]
    upto = _running_sum(counts.T).T
    tiles_of = (upto[-1] + (tile_rows - 1)) // tile_rows
    ends = _running_sum(tiles_of)

    place = jnp.arange(group_size)
    is_before = (groups[:, None] == groups[:, :, None]) & (place < place[:, None])
    rank = jnp.sum(is_before, axis=-1, dtype=jnp.int32)
    expert = jnp.clip(groups, 0, num_experts - 1)
    before = jnp.take_along_axis(upto - counts, expert, axis=1)
    first_row = (ends - tiles_of)[expert] * tile_rows
    rows = (first_row + before + rank).reshape(-1)[:size]

    most = most_tiles(size, num_experts, tile_rows)
    is_expert = (chosen >= 0) & (chosen < num_experts)
    targets = jnp.where(is_expert.reshape(-1), rows, most * tile_rows)
    choices = _invert(targets, most * tile_rows)
    rows = rows.reshape(chosen.shape)
    return Tiles(_experts_of_tiles(ends, most), ends, rows, choices)


def most_tiles(num_choices: int, num_experts: int, tile_rows: int) -> int:
    """The most tiles that this number of choices can have: each expert fills up its last one."""
    touched = min(num_choices, num_experts)
    return min(num_choices, (num_choices + (tile_rows - 1) * touched) // tile_rows)


def _count(numbers: jax.Array, num_experts: int) -> jax.Array:
    """How often each expert is among the numbers along the last axis."""
    experts = jnp.arange(num_experts)[:, None]
    return jnp.sum(numbers[..., None, :] == experts, axis=-1, dtype=jnp.int32)


def _running_sum(numbers: jax.Array) -> jax.Array:
    """The sum of the numbers along the last axis up to each."""
    place = jnp.arange(numbers.shape[-1])
    upto = jnp.where(place <= place[:, None], numbers[..., None, :], 0)
    return jnp.sum(upto, axis=-1, dtype=jnp.int32)


def _experts_of_tiles(ends: jax.Array, most: int) -> jax.Array:
    """The expert of each tile, given the tiles up to each expert's last."""
    return jnp.sum(ends <= jnp.arange(most)[:, None], axis=-1, dtype=jnp.int32)


def _invert(targets: jax.Array, size: int) -> jax.Array:
    """The place of each number among the targets, which are different; 0 for others."""
    places = jnp.arange(len(targets), dtype=jnp.int32)
    if len(targets) * size > _MOST_PAIRS:
        zeros = jnp.zeros(size, jnp.int32)
        return zeros.at[targets].set(places, mode="drop", unique_indices=True)
    is_target = targets == jnp.arange(size)[:, None]
    return jnp.sum(jnp.where(is_target, places, 0), axis=-1, dtype=jnp.int32)

"""Puts a step's heads where the attention kernels for Hopper GPUs want them, in one launch.

The projection of a layer leaves queries, keys and values of a token side by side, [N + 2K, H]. This
kernel rotates queries and keys, writes keys and values to their pages, and writes the queries in
both forms that the other kernels read: those of decodes grouped by kv head and padded, and, in
programs with chunks and short rows, those of all tokens. It also makes the array of the outputs,
whose rows of padding nobody else writes. XLA would need a launch for almost each of these.

A thread block has one token. It computes in tiles of a few heads, a warp or two for each head. An
element and its partner in the rotation are half a head apart, so a tile is loaded as two halves,
and both are in the same thread. All tiles of a part of the heads are loaded before the first one is
stored: otherwise each load would wait for the stores before it.

Roofline: a token's heads are read once, and written once or twice; few bytes, so the time is that
of one access to memory.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.compat import store_unoptimized
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig
from jaxllm_kernels.ragged_paged_attention.gpu_tuning import (
    PREFILL_TILE_TOKENS,
    padded_group_size,
)

_TILE_HEADS = 4
# Tiles that are in registers at the same time.
_MOST_TILES = 12


class Placed(NamedTuple):
    """A step's heads after their rotation."""

    # [R, K, C, H]: the queries of the first rows, which may be decodes. What is beside a group's
    # heads is arbitrary, and so are the outputs that nobody takes from it.
    grouped: jax.Array
    # [T + PREFILL_TILE_TOKENS - 1, N, H]: those of all tokens; the rest is arbitrary. None if the
    # batch is decode_only.
    queries: jax.Array | None
    out: jax.Array  # [T, N, H]: zero in rows of padding, arbitrary in others
    cache: jax.Array


def can_place(config: AttentionConfig, rotary_size: int | None) -> bool:
    """Whether the kernel supports a layer. Others take the way through XLA."""
    group_size = config.num_heads // config.num_kv_heads
    # A tile of queries may reach past its group, but not past the token's heads.
    excess = -group_size % _TILE_HEADS
    # Two heads are a tile of two warps each, which half of a head of 64 is too short for.
    head_sizes = (128, 256) if config.num_kv_heads == 1 else (64, 128, 256)
    return (
        config.kv_dtype is None
        and config.head_size in head_sizes
        and rotary_size in (None, config.head_size)
        and config.num_heads >= _TILE_HEADS
        and excess <= 2 * config.num_kv_heads
    )


def place(
    heads: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    cache: jax.Array,
    blocks: jax.Array,
    positions: jax.Array,
    *,
    config: AttentionConfig,
    num_rows: int,
    decode_only: bool,
    interpret: Any,
) -> Placed:
    """Rotate and write the heads [T, N + 2K, H].

    `rotary` has cos and sin, float32 [T, H / 2]; None: nothing is rotated. Token t is written to
    block `blocks[t]`, unless that is out of range, at its position, which is negative for padding.
    """
    num_tokens, _, head_size = heads.shape
    num_heads, num_kv_heads = config.num_heads, config.num_kv_heads
    num_blocks, *_, block_size, _ = cache.shape
    half = head_size // 2
    tiles = _tiles_of_queries(config, decode_only)
    kv_rows = min(2 * num_kv_heads, _TILE_HEADS)

    def kernel(
        heads_ref,
        rotary_refs,
        blocks_ref,
        positions_ref,
        cache_ref,
        grouped_ref,
        queries_ref,
        out_ref,
    ):
        token = lax.axis_index("token")
        block, position = blocks_ref[token], positions_ref[token]

        def load(first, rows):
            """Both halves of some heads."""
            return [
                _load(
                    heads_ref.at[token, pl.ds(first, rows), pl.ds(start, half)], _layout(rows, half)
                )
                for start in (0, half)
            ]

        def rotate(halves):
            if rotary_refs is None:
                return halves
            shape = halves[0].shape
            of_columns = _layout(*shape).reduce(0)
            cos, sin = (
                lax.broadcast_in_dim(_load(ref.at[token], of_columns), shape, [1])
                for ref in rotary_refs
            )
            first, second = (x.astype(jnp.float32) for x in halves)
            pair = first * cos - second * sin, second * cos + first * sin
            return [x.astype(heads.dtype) for x in pair]

        def rotate_keys(first, halves):
            """Rotate the keys among some of the keys and values."""
            num_keys = num_kv_heads - first
            # Without a rotation a tile of both needs no choice, and Mosaic GPU has no layout for a
            # choice between equal values.
            if rotary_refs is None or num_keys <= 0:
                return halves
            if num_keys >= kv_rows:
                return rotate(halves)
            return [
                jnp.where(_is_row_below(num_keys, x.shape), turned, x)
                for turned, x in zip(rotate(halves), halves, strict=True)
            ]

        def store(ref, index, halves):
            for start, x in zip((0, half), halves, strict=True):
                store_unoptimized(ref.at[(*index, pl.ds(start, half))], x)

        def write_queries(part):
            loaded = [rotate(load(tile.first, _TILE_HEADS)) for tile in part]

            def write_grouped():
                for tile, halves in zip(part, loaded, strict=True):
                    if tile.place is not None:
                        kv_head, row = tile.place
                        index = token, kv_head, pl.ds(row, _TILE_HEADS)
                        store(grouped_ref, index, halves)

            if num_rows == num_tokens:
                write_grouped()
            else:
                pl.when(token < num_rows)(write_grouped)
            for tile, halves in zip(part, loaded, strict=True):
                if tile.is_flat:
                    store(queries_ref, (token, pl.ds(tile.first, _TILE_HEADS)), halves)

        def write_keys_and_values():
            # Keys and values of a page follow each other, as they do in the token.
            firsts = _firsts(2 * num_kv_heads, kv_rows)
            loaded = [rotate_keys(first, load(num_heads + first, kv_rows)) for first in firsts]
            slot = lax.rem(jnp.maximum(position, 0), jnp.int32(block_size))
            for first, halves in zip(firsts, loaded, strict=True):
                store(cache_ref, (block, pl.ds(first, kv_rows), slot), halves)

        for i in range(0, len(tiles), _MOST_TILES):
            write_queries(tiles[i : i + _MOST_TILES])
        pl.when((position >= 0) & (block >= 0) & (block < num_blocks))(write_keys_and_values)

        @pl.when(position < 0)
        def _():
            zeros = jnp.zeros((_TILE_HEADS, half), heads.dtype)
            zeros = plgpu.layout_cast(zeros, _layout(_TILE_HEADS, half))
            for first in _firsts(num_heads, _TILE_HEADS):
                store(out_ref, (token, pl.ds(first, _TILE_HEADS)), [zeros] * 2)

    flat = (num_tokens + PREFILL_TILE_TOKENS - 1, num_heads, head_size)
    # Keys and values as one axis of heads.
    pages = jax.new_ref(cache.reshape(num_blocks, 2 * num_kv_heads, block_size, head_size))
    grouped, queries, out = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(
                (num_rows, num_kv_heads, padded_group_size(config), head_size), heads.dtype
            ),
            None if decode_only else jax.ShapeDtypeStruct(flat, heads.dtype),
            jax.ShapeDtypeStruct((num_tokens, num_heads, head_size), heads.dtype),
        ),
        grid=(num_tokens,),
        grid_names=("token",),
        interpret=interpret,
        kernel_name="place_heads",
    )(heads, rotary, blocks, positions, pages)
    return Placed(grouped, queries, out, jax.freeze(pages).reshape(cache.shape))


class _Tile(NamedTuple):
    """Consecutive query heads of a token."""

    first: int
    place: tuple[int, int] | None  # its kv head and first row in it; None if it is not grouped
    is_flat: bool  # whether it is written to the queries of all tokens


def _tiles_of_queries(config: AttentionConfig, decode_only: bool) -> list[_Tile]:
    """Tiles within the groups, and, if those do not serve, others for the flat queries.

    A tile within a group may reach into the next one. What it has of that is written to rows of
    padding.
    """
    group_size = config.num_heads // config.num_kv_heads
    places = {
        kv_head * group_size + row: (kv_head, row)
        for kv_head in range(config.num_kv_heads)
        for row in range(0, group_size, _TILE_HEADS)
    }
    flat = () if decode_only else _firsts(config.num_heads, _TILE_HEADS)
    return [_Tile(first, places.get(first), first in flat) for first in sorted({*places, *flat})]


def _firsts(size: int, tile: int) -> list[int]:
    """The first rows of tiles that cover all rows; the last one may overlap the one before."""
    return [min(first, size - tile) for first in range(0, size, tile)]


def _layout(rows: int, columns: int):
    """A warp for each row, or two if there are only two rows."""
    if rows == _TILE_HEADS:
        tiles, warp_dims = ((rows, columns), (columns // 32,)), (-3,)
    else:
        tiles, warp_dims = ((rows, columns), (columns // 2,), (columns // 64,)), (-4, -3)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=warp_dims, lane_dims=(-2,), vector_dim=-1
    )


def _is_row_below(row: int, shape: tuple[int, int]):
    of_rows = _layout(*shape).reduce(1)
    rows = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=of_rows)
    return lax.broadcast_in_dim(rows < row, shape, [0])


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

"""Writes a step's rows to their pages, and makes the array of the outputs, in one launch.

A thread block has one token. Only outputs of padding are written here: all others are written by
the kernels of the attention.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.compat import store_unoptimized
from jaxllm_kernels.mla.gpu_tiles import Teams

# A row is copied in pieces of so many numbers: the copy engine has no wider ones than 256.
PIECE = 64


def place(
    rows: jax.Array,
    cache: jax.Array,
    blocks: jax.Array,
    positions: jax.Array,
    *,
    teams: Teams,
    latent_size: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Return outputs [T * heads, L], zero for padding and else arbitrary, and the cache with rows.

    Rows are [T, width]. Token t is written to block `blocks[t]`, unless that is out of range, at
    its position, which is negative for padding.
    """
    num_tokens, width = rows.shape
    num_blocks, block_size, _ = cache.shape
    pieces = width // PIECE
    zero_shape = (8, latent_size)

    def kernel(rows_ref, blocks_ref, positions_ref, cache_ref, out_ref, *, row, loaded):
        token = lax.axis_index("token")
        block, position = blocks_ref[token], positions_ref[token]

        @pl.when((position >= 0) & (block >= 0) & (block < num_blocks))
        def _():
            plgpu.copy_gmem_to_smem(rows_ref.at[token], row, loaded)
            plgpu.barrier_wait(loaded)
            slot = lax.rem(position, jnp.int32(block_size))
            plgpu.copy_smem_to_gmem(row, cache_ref.at[block, slot])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(position < 0)
        def _():
            zeros = plgpu.layout_cast(
                jnp.zeros(zero_shape, rows.dtype), plgpu.Layout.WG_STRIDED(zero_shape, 8)
            )

            def clear(i, _):
                line = pl.multiple_of(token * teams.heads + i * 8, 8)
                store_unoptimized(out_ref.at[pl.ds(line, 8)], zeros)

            lax.fori_loop(jnp.int32(0), jnp.int32(teams.heads // 8), clear, None)

    pages = jax.new_ref(cache.reshape(num_blocks, block_size, pieces, PIECE))
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_tokens * teams.heads, latent_size), rows.dtype),
        grid=(num_tokens,),
        grid_names=("token",),
        scratch_types=dict(row=plgpu.SMEM((pieces, PIECE), rows.dtype), loaded=plgpu.Barrier()),
        interpret=interpret,
        kernel_name="place_latents",
    )(rows.reshape(num_tokens, pieces, PIECE), blocks, positions, pages)
    return out, jax.freeze(pages).reshape(cache.shape)

"""Merges the parts of tiles whose cached rows several teams have on Hopper GPUs.

Only the tile at a team's end can go on in the next one, so each team has at most one to merge.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.compat import store_unoptimized
from jaxllm_kernels.mla.gpu_attend import Partials
from jaxllm_kernels.mla.gpu_tiles import BLOCK, FRONT, LINES, Teams, Tiles
from jaxllm_kernels.ragged_paged_attention.gpu_softmax import UNSEEN

# Lines and columns of a thread block.
_LINES = 8
_MOST_COLUMNS = 256

# Parts that are loaded at the same time: a tile may have one in each team.
_AT_ONCE = 8

# A warp has two lines, a thread four adjacent numbers of each piece of 64.
_MATRIX = plgpu.Layout.TILED(
    plgpu.Tiling(((_LINES, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
_PER_LINE = _MATRIX.reduce(1)


def merge(partials: Partials, tiles: Tiles, out: jax.Ref, *, teams: Teams, interpret: Any) -> None:
    """Write the merged results to their lines of out [T * heads, L]."""
    latent_size = partials.out.shape[-1]
    num_columns = min(latent_size, _MOST_COLUMNS)

    def kernel(partials_ref, tiles_ref, out_ref):
        team, panel = lax.axis_index("team"), lax.axis_index("panel")
        before = lax.axis_index("line") * _LINES
        share = tiles_ref.share[0]
        tile = tiles_ref.last_tile[team] - 1
        has_tile = tile >= tiles_ref.first_tile[team]
        tile = jnp.maximum(tile, 0)
        first_place = tiles_ref.start[tile] + FRONT
        last_place = first_place + lax.div(tiles_ref.end[tile] - 1, jnp.int32(BLOCK))
        last_team = lax.div(last_place, share)
        is_ours = has_tile & (first_place >= team * share) & (last_team > team)

        @pl.when(is_ours & (before < tiles_ref.num_lines[tile]))
        def _():
            member, line = lax.div(before, jnp.int32(LINES)), lax.rem(before, jnp.int32(LINES))
            lines = pl.ds(pl.multiple_of(line, _LINES), _LINES)
            columns = pl.ds(pl.multiple_of(panel * num_columns, num_columns), num_columns)
            num_parts = last_team - team + 1

            def part_of(i):
                number = jnp.where(i == 0, 2 * team + 1, 2 * (team + i))
                return number * teams.size + member

            def add_parts(k, merged):
                weighted, largest, total = merged
                places = [k * _AT_ONCE + i for i in range(_AT_ONCE)]
                parts = [part_of(jnp.minimum(place, num_parts - 1)) for place in places]
                sums = [_load(partials_ref.out.at[part, lines, columns], _MATRIX) for part in parts]
                logs = [_load(partials_ref.weight.at[part, lines], _PER_LINE) for part in parts]
                # Those after the last are the last again, without weight.
                logs = [
                    jnp.minimum(log, jnp.where(place < num_parts, -UNSEEN, UNSEEN))
                    for place, log in zip(places, logs, strict=True)
                ]
                new_largest = largest
                for log in logs:
                    new_largest = jnp.maximum(new_largest, log)
                decay = jnp.exp2(largest - new_largest)
                total, weighted = total * decay, weighted * _over_columns(decay, num_columns)
                for log, x in zip(logs, sums, strict=True):
                    weight = jnp.exp2(log - new_largest)
                    total += weight
                    weighted += x * _over_columns(weight, num_columns)
                return weighted, new_largest, total

            nothing = jnp.zeros((_LINES,), jnp.float32)
            zeros = jnp.zeros((_LINES, num_columns), jnp.float32)
            merged = (
                plgpu.layout_cast(zeros, _MATRIX),
                plgpu.layout_cast(jnp.full_like(nothing, UNSEEN), _PER_LINE),
                plgpu.layout_cast(nothing, _PER_LINE),
            )
            num_turns = lax.div(num_parts + (_AT_ONCE - 1), jnp.int32(_AT_ONCE))
            weighted, _, total = lax.fori_loop(jnp.int32(0), num_turns, add_parts, merged)
            weighted = weighted * _over_columns(1.0 / total, num_columns)
            target = pl.multiple_of(tiles_ref.line[tile] + before, _LINES)
            store_unoptimized(
                out_ref.at[pl.ds(target, _LINES), columns], weighted.astype(out.dtype)
            )

    plgpu.kernel(
        kernel,
        out_type=(),
        grid=(teams.number, teams.lines // _LINES, latent_size // num_columns),
        grid_names=("team", "line", "panel"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="merge_latents",
    )(partials, tiles, out)


def _over_columns(x, num_columns: int):
    return lax.broadcast_in_dim(x, (*x.shape, num_columns), [0])


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

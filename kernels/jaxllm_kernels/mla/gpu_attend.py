"""Latent attention on Hopper GPUs: lines of queries against the cached rows of their request.

A thread block has 64 lines of a tile (`gpu_tiles`), whatever mixture of tokens and heads they are,
and a share of the tile's cached rows. A block of rows is loaded once, and is keys and values. It
takes 72 KB at a width of 576, and so do the queries. So a ring of two blocks is all that fits.

A producer warpgroup loads blocks (`BlockRing`). The sums of a line are 512 float32, which do not
fit into the registers of one compute warpgroup, so two have half of the columns each:

    warpgroup 0   q.k  softmax |  p.v of the first half   q.k  softmax |  p.v ...
    warpgroup 1                |  p.v of the second half               |  p.v ...

Warpgroup 0 hands over two things through shared memory: factors for the sums of earlier blocks, as
soon as it knows them, and a block's weights. So warpgroup 1 has multiplied its sums when the
weights arrive, and its products run while warpgroup 0 multiplies its own. At a tile's end there are
factors once more, which normalise the sums.

A line's result has its lines apart from others, so lines beyond a tile's end may hold anything:
they are computed and not stored. Outputs are stored in pieces of 64, 32, 16 and 8 lines, in the
memory that the queries had.

If other thread blocks have other shares of a tile's rows, its results are *partial*: float32, and
with the logarithm of the sum of weights. `gpu_merge` puts them together.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.compat import smem_transforms
from jaxllm_kernels.mla.api import LatentConfig
from jaxllm_kernels.mla.gpu_tiles import BLOCK, FRONT, LINES, Teams, Tiles
from jaxllm_kernels.ragged_paged_attention.gpu_blocks import (
    BlockRing,
    Pages,
    Span,
    operand_transforms,
)
from jaxllm_kernels.ragged_paged_attention.gpu_softmax import LOG2_E, UNSEEN

_NUM_STAGES = 2

# Registers per thread: of the producer, and of each compute warpgroup. A thread block starts with
# 168 for each of its three warpgroups. A warpgroup that requests more than the others have released
# waits forever, so the sum is at most 504.
_REGISTERS = (40, 232)

# Columns of partial results that are stored at a time.
_PARTIAL_COLUMNS = 128

_MATRIX = plgpu.Layout.WGMMA
_PER_LINE = plgpu.Layout.WGMMA.reduce(1)
_PER_KEY = plgpu.Layout.WGMMA.reduce(0)


class Partials(NamedTuple):
    """Normalised results of a part of a tile's rows.

    The part with which team t begins is number 2t if another team has an earlier one of the tile.
    The part with which it ends is number 2t + 1 if other teams have the later ones. Each has the
    lines of the team's thread blocks.
    """

    out: jax.Array  # float32 [2 * teams * team size, LINES, L]
    weight: jax.Array  # float32 [2 * teams * team size, LINES]: log2 of the sum of weights


class _Item(NamedTuple):
    """A thread block's lines of a tile, and its share of the tile's blocks."""

    line: jax.Array
    num_lines: jax.Array
    shift: jax.Array
    end: jax.Array  # of what the tile's last line sees
    rows: Span
    begins: jax.Array  # whether no other team has an earlier part of the tile
    ends: jax.Array  # whether no other team has a later part


def attend(
    q: jax.Array,
    cache: jax.Array,
    block_tables: jax.Array,
    tiles: Tiles,
    out: jax.Ref,
    *,
    config: LatentConfig,
    teams: Teams,
    interpret: Any,
) -> Partials:
    """Write the results of tiles that one team has to their lines of out [T * heads, L].

    Queries are [T * heads, width], with the lines of a tile or more after the last one.
    """
    half = config.latent_size // 2
    width = cache.shape[-1]
    partial_columns = min(half, _PARTIAL_COLUMNS)
    ring = BlockRing(
        block_tokens=BLOCK,
        page_tokens=cache.shape[1],
        head_size=width,
        num_stages=_NUM_STAGES,
        num_staged=0,
        num_readers=2,
        dtype=q.dtype,
        cache_dtype=cache.dtype,
        num_kinds=1,
    )
    factor = config.scale * LOG2_E

    def kernel(
        q_ref,
        cache_ref,
        tables_ref,
        tiles_ref,
        out_ref,
        partials_ref,
        *,
        blocks,
        lines,
        weights,
        factors,
        query_full,
        query_free,
        factors_full,
        weights_full,
        read,
    ):
        queries, staged_out, staged_partial = lines
        worker = lax.axis_index("worker")
        team, member = lax.div(worker, teams.size), lax.rem(worker, teams.size)
        share = tiles_ref.share[0]
        first, last = tiles_ref.first_tile[team], tiles_ref.last_tile[team]

        def read_item(i) -> _Item:
            tile = first + i
            row, end = tiles_ref.row[tile], tiles_ref.end[tile]
            first_line, num_lines = tiles_ref.line[tile], tiles_ref.num_lines[tile]
            # Places of this team's share, counted from the tile's first block.
            begin = team * share - (tiles_ref.start[tile] + FRONT)
            stop = begin + share
            span = Span(row, None, jnp.maximum(begin, 0) * BLOCK, jnp.minimum(stop * BLOCK, end))
            before = member * LINES
            return _Item(
                line=first_line + before,
                num_lines=jnp.clip(num_lines - before, 0, LINES),
                shift=tiles_ref.shift[tile],
                end=end,
                rows=span,
                begins=begin <= 0,
                ends=stop * BLOCK >= end,
            )

        def produce():
            plgpu.set_max_registers(_REGISTERS[0], action="decrease")
            pages = Pages(cache_ref, tables_ref)
            ring.send_all(last - first, lambda i: read_item(i).rows, pages, blocks)

        def add_values(weighted, rows, columns: range):
            """The sums of some columns, with those of a block."""
            return _accumulate(
                weighted, weights, rows.at[:, pl.ds(columns.start, half)], bool(interpret)
            )

        def store(item: _Item, group: int, weighted):
            """Store normalised sums, of half of the columns."""
            is_whole = item.begins & item.ends
            columns = pl.ds(group * half, half)

            @pl.when(is_whole)
            def _():
                staged_out[group] = weighted.astype(q.dtype)
                plgpu.commit_smem()
                _store_lines(
                    staged_out.at[group], out_ref.at[:, columns], item.line, item.num_lines
                )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            @pl.when(~is_whole)
            def _():
                target = partials_ref.out.at[partial_number(item)]
                for start in range(0, half, partial_columns):
                    staged_partial[group] = weighted[:, start : start + partial_columns]
                    plgpu.commit_smem()
                    of_part = target.at[:, pl.ds(group * half + start, partial_columns)]
                    _store_lines(staged_partial.at[group], of_part, jnp.int32(0), item.num_lines)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        def partial_number(item: _Item):
            return (2 * team + item.begins.astype(jnp.int32)) * teams.size + member

        def compute_first_half():
            plgpu.set_max_registers(_REGISTERS[1], action="increase")

            def send_factors(of_lines):
                plgpu.barrier_wait(read)  # the other warpgroup has read everything so far
                factors[...] = of_lines
                plgpu.commit_smem()
                plgpu.barrier_arrive(factors_full)

            def attend_item(i, used):
                item = read_item(i)
                span = item.rows
                # Both warpgroups have stored what was in this memory.
                plgpu.barrier_wait(query_free)
                line = pl.multiple_of(item.line, 8)
                plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(line, LINES)], queries.at[0], query_full)
                # The lines of heads of a token see the same rows. Those beyond the tile's end see
                # nothing past the context.
                position = lax.div(item.line + _iota(LINES, _PER_LINE), jnp.int32(teams.heads))
                last_seen = jnp.minimum(position + item.shift, item.end - 1)
                plgpu.barrier_wait(query_full)

                def attend_block(j, softmax, *, is_masked):
                    weighted, largest, total = softmax
                    rows = ring.wait(blocks, 0, used + j)
                    first_row = span.start + j * BLOCK
                    # An index that depends on the block: otherwise the compiler computes the 36
                    # addresses of the queries before the loop, and has no registers for them.
                    scores = _multiply(queries.at[jnp.minimum(used + j, 0)], rows.T)
                    if is_masked:
                        key = _over_rows(_iota(BLOCK, _PER_KEY), LINES)
                        seen = key <= _over_columns(last_seen - first_row, BLOCK)
                        # Multiplied before. Otherwise the multiplication and the subtraction below
                        # are one instruction, which rounds once. Of a line that sees nothing here
                        # it leaves what the largest score lost by rounding: 1e22, of UNSEEN.
                        scores, factor_left = jnp.where(seen, scores * factor, UNSEEN), 1.0
                    else:
                        factor_left = factor
                    new_largest = jnp.maximum(largest, scores.max(axis=1) * factor_left)
                    decay = jnp.exp2(largest - new_largest)
                    send_factors(decay)
                    p = jnp.exp2(scores * factor_left - _over_columns(new_largest, BLOCK))
                    total = total * decay + p.sum(axis=1)
                    weights[...] = p.astype(ring.dtype)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(weights_full)
                    if is_masked:
                        ring.zero_end(blocks, used + j, item.end - first_row, range(half))
                    weighted = weighted * _over_columns(decay, half)
                    weighted = add_values(weighted, rows, range(half))
                    ring.release(blocks, 0, used + j)
                    return weighted, new_largest, total

                # Every line sees the blocks before `masked` completely.
                seen_by_first = lax.div(item.line, jnp.int32(teams.heads)) + item.shift + 1
                num_blocks = ring.count_blocks(span)
                masked = lax.div(seen_by_first - span.start, jnp.int32(BLOCK))
                masked = jnp.clip(masked, 0, num_blocks)
                nothing = jnp.zeros((LINES,), jnp.float32)
                softmax = (
                    plgpu.layout_cast(jnp.zeros((LINES, half), jnp.float32), _MATRIX),
                    plgpu.layout_cast(jnp.full_like(nothing, UNSEEN), _PER_LINE),
                    plgpu.layout_cast(nothing, _PER_LINE),
                )
                for begin, end, is_masked in ((0, masked, False), (masked, num_blocks, True)):
                    body = functools.partial(attend_block, is_masked=is_masked)
                    softmax = lax.fori_loop(begin, end, body, softmax)
                weighted, largest, total = softmax
                send_factors(1.0 / total)
                item = read_item(i)  # read again, and not kept in registers meanwhile

                @pl.when(~(item.begins & item.ends))
                def _():
                    partials_ref.weight[partial_number(item)] = largest + jnp.log2(total)

                store(item, 0, weighted * _over_columns(1.0 / total, half))
                return used + num_blocks

            lax.fori_loop(jnp.int32(0), last - first, attend_item, jnp.int32(0))
            # Whatever has been signalled is waited for.
            plgpu.barrier_wait(read)
            plgpu.barrier_wait(query_free)
            plgpu.wait_smem_to_gmem(0)

        def compute_second_half():
            plgpu.set_max_registers(_REGISTERS[1], action="increase")
            # Nothing is in the memory of queries, factors and weights.
            plgpu.barrier_arrive(query_free)
            plgpu.barrier_arrive(read)

            def receive_factors():
                plgpu.barrier_wait(factors_full)
                return plgpu.load(factors, layout=_PER_LINE, optimized=False)  # pyright: ignore[reportCallIssue]

            def attend_item(i, used):
                item = read_item(i)
                span = item.rows

                def attend_block(j, weighted):
                    weighted = weighted * _over_columns(receive_factors(), half)
                    plgpu.barrier_wait(weights_full)
                    rows = ring.wait(blocks, 0, used + j)
                    left = item.end - (span.start + j * BLOCK)
                    ring.zero_end(blocks, used + j, left, range(half, 2 * half))
                    weighted = add_values(weighted, rows, range(half, 2 * half))
                    plgpu.barrier_arrive(read)
                    ring.release(blocks, 0, used + j)
                    return weighted

                zeros = plgpu.layout_cast(jnp.zeros((LINES, half), jnp.float32), _MATRIX)
                num_blocks = ring.count_blocks(span)
                weighted = lax.fori_loop(jnp.int32(0), num_blocks, attend_block, zeros)
                factor = receive_factors()
                item = read_item(i)
                plgpu.barrier_arrive(read)
                store(item, 1, weighted * _over_columns(factor, half))
                plgpu.barrier_arrive(query_free)
                return used + num_blocks

            lax.fori_loop(jnp.int32(0), last - first, attend_item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        group = lax.axis_index("warpgroup")
        pl.when(group == 0)(compute_first_half)
        pl.when(group == 1)(compute_second_half)
        pl.when(group == 2)(produce)

    operand = operand_transforms(64, q.dtype)
    scratch: dict[str, Any] = dict(
        blocks=ring.scratch(),
        # Outputs replace the queries in the same memory. Interpret mode would take the parts of a
        # union for one, and report a race.
        lines=(_apart if interpret else plgpu.RefUnion)(
            plgpu.SMEM((1, LINES, width), q.dtype, transforms=operand),
            plgpu.SMEM((2, LINES, half), q.dtype, transforms=operand),
            plgpu.SMEM(
                (2, LINES, partial_columns), jnp.float32, transforms=smem_transforms((8, 32), 128)
            ),
        ),
        weights=plgpu.SMEM((LINES, BLOCK), q.dtype, transforms=operand),
        factors=plgpu.SMEM((LINES,), jnp.float32),
        query_full=plgpu.Barrier(),
        query_free=plgpu.Barrier(),
        factors_full=plgpu.Barrier(),
        weights_full=plgpu.Barrier(),
        read=plgpu.Barrier(),
    )
    num_parts = 2 * teams.number * teams.size
    of_parts = Partials(
        jax.ShapeDtypeStruct((num_parts, LINES, config.latent_size), jnp.float32),  # pyright: ignore[reportArgumentType]
        jax.ShapeDtypeStruct((num_parts, LINES), jnp.float32),  # pyright: ignore[reportArgumentType]
    )
    (partials,) = plgpu.kernel(
        kernel,
        out_type=(of_parts,),
        grid=(teams.number * teams.size,),
        grid_names=("worker",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Lines of scores are reduced within warps, which needs no scratch.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="latent_attention",
    )(q, cache, block_tables, tiles, out)
    return partials


def _multiply(a, b):
    """The product of two matrices in shared memory, float32 in registers."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def _accumulate(weighted, weights, values, is_interpreted: bool):
    """weighted + weights @ values. Interpret mode does not support accumulators with a value."""
    if is_interpreted:
        return weighted + _multiply(weights, values)
    return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, weights, values))(
        plgpu.WGMMAAccumulatorRef.init(weighted)
    )


def _store_lines(source, target_ref, first, num_lines):
    """Start to store the first `num_lines` lines, a multiple of 8, to the lines from `first` on."""
    for size in (64, 32, 16, 8):
        done = num_lines & (-2 * size)

        @pl.when((num_lines & size) != 0)
        def _(size=size, done=done):
            line = pl.multiple_of(first + done, 8)
            plgpu.copy_smem_to_gmem(
                source.at[pl.ds(pl.multiple_of(done, 8), size)],
                target_ref.at[pl.ds(line, size)],
                commit_group=False,
            )

    plgpu.commit_smem_to_gmem_group()


def _apart(*refs):
    return refs


def _over_columns(x, num_columns: int):
    """x [lines] as every column of a [lines, num_columns]."""
    return lax.broadcast_in_dim(x, (*x.shape, num_columns), [0])


def _over_rows(x, num_rows: int):
    """x [keys] as every row of a [num_rows, keys]."""
    return lax.broadcast_in_dim(x, (num_rows, *x.shape), [1])


def _iota(length: int, layout):
    return plgpu.broadcasted_iota(jnp.int32, (length,), 0, layout=layout)

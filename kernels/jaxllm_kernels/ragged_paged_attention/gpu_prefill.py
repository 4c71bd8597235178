"""Prefill attention on Hopper GPUs: tiles of query tokens against their row's paged context.

A tile's products grow with its tokens, but the keys that it reads do not. So the limit is the
tensor cores. A tile is 128 tokens of one query head: 64 for each of two compute warpgroups. Both
read the same blocks, which a producer warpgroup fetches, and take turns (`gpu_turns`). Warpgroup 0
is a turn ahead, so it zeroes the end of the last block of values for both.

Where tokens of an image see each other, a tile reads the keys up to the last one that any of its
tokens sees, and its masks have the last key of each (`RaggedBatch.last_seen`). All keys of the step
are in the cache before.

Blocks that every query sees are not masked. The others are the last ones and, with a window, the
first ones; so there are two loops over blocks, or three.

Chunks start anywhere in the flat batch. The copy engine's tiled loads and stores do not allow that.
So queries are loaded through registers, once per tile, and outputs are stored in pieces of 64, 32,
... tokens, by the bits of their number. That costs a few percent of a tile over 2,000 keys
(computed, not measured), and no store touches another row.

A store begins at a multiple of 128 bytes of shared memory. With heads of 64, 96 or more numbers
every second row does, and no piece begins at another. With 80 only every fourth row does. So a
warpgroup stages such outputs twice, the second time two rows further on: a single row begins well
in one of both.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.compat import smem_transforms, store_unoptimized
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig
from jaxllm_kernels.ragged_paged_attention.gpu_blocks import (
    BlockRing,
    Pages,
    Span,
    operand_columns,
    operand_transforms,
)
from jaxllm_kernels.ragged_paged_attention.gpu_softmax import (
    UNSEEN,
    UNSEEN_PRODUCT,
    HeadScalars,
    of_head,
    score_factor,
    to_unscaled_scores,
)
from jaxllm_kernels.ragged_paged_attention.gpu_tuning import (
    GROUP_TOKENS,
    NUM_GROUPS,
    Tuning,
)
from jaxllm_kernels.ragged_paged_attention.gpu_turns import (
    MATRIX,
    PER_KEY,
    PER_TOKEN,
    REGISTERS,
    Softmax,
    Turns,
    iota,
    over_columns,
    over_rows,
    weights_scratch,
)
from jaxllm_kernels.ragged_paged_attention.gpu_worklist import PrefillTiles, item_of_worker

_STORE_ALIGNMENT = 128  # bytes
# Rows by which the second copy of outputs is moved.
_MOVED_BY = 2

# A producer that converts blocks needs more registers.
_REGISTERS_IF_CONVERTING = (56, 224)


class _Item(NamedTuple):
    """A tile and a query head."""

    token: jax.Array  # flat position of the first query
    position: jax.Array  # of the first query in its row's context
    num_tokens: jax.Array  # 0 after the last item
    head: jax.Array
    keys: Span


def prefill(
    q: jax.Array,
    cache: jax.Array,
    block_tables: jax.Array,
    tiles: PrefillTiles,
    scalars: HeadScalars,
    out: jax.Ref,
    *,
    config: AttentionConfig,
    num_workers: int,
    tuning: Tuning,
    interpret: Any,
) -> None:
    """Write the attention of the queries in tiles to out [T, N, H].

    The queries are [T, N, H] with PREFILL_TILE_TOKENS - 1 rows more.
    """
    ring = BlockRing.of(tuning, cache=cache, dtype=q.dtype, num_readers=NUM_GROUPS)
    _, num_heads, head_size = q.shape
    heads_per_kv_head = num_heads // config.num_kv_heads
    block_tokens = ring.block_tokens
    sees_ahead = tiles.last_seen is not None
    registers = _REGISTERS_IF_CONVERTING if ring.converts else REGISTERS
    # Registers do not suffice for a third loop if the head size is 256 and the producer converts.
    # Then all blocks of a window are masked.
    has_three_loops = config.sliding_window is not None and not (ring.converts and head_size > 128)

    def kernel(
        q_ref,
        cache_ref,
        tables_ref,
        tiles_ref,
        scalars_ref,
        out_ref,
        *,
        blocks,
        queries_or_outputs,
        turn,
        moved_outputs=None,
        weights=None,
    ):
        queries, outputs = queries_or_outputs
        group = lax.axis_index("warpgroup")
        turns = Turns(ring=ring, blocks=blocks, turn=turn, group=group, weights=weights)
        worker = lax.axis_index("worker")

        def count_items():
            num_items = tiles_ref.num_tiles[0] * num_heads
            turns = lax.div(num_items, jnp.int32(num_workers))
            has_one_more = item_of_worker(worker, turns, num_workers) < num_items
            return turns + has_one_more.astype(jnp.int32)

        def read_item(i) -> _Item:
            # Adjacent items are heads of one tile: heads that share a kv head find its keys in L2.
            item = item_of_worker(worker, i, num_workers)
            head = lax.rem(item, jnp.int32(num_heads))
            # The last entry of the worklist is always padding.
            index = jnp.minimum(lax.div(item, jnp.int32(num_heads)), tiles_ref.row.shape[0] - 1)
            position, num_tokens = tiles_ref.position[index], tiles_ref.num_tokens[index]
            start = jnp.int32(0)
            if config.sliding_window is not None:
                start = jnp.maximum(position - (config.sliding_window - 1), 0)
                start = lax.div(start, jnp.int32(ring.load_tokens)) * ring.load_tokens
            kv_head = lax.div(head, jnp.int32(heads_per_kv_head))
            keys = Span(
                tiles_ref.row[index],
                kv_head,
                start,
                position + num_tokens if tiles_ref.end is None else tiles_ref.end[index],
            )
            return _Item(tiles_ref.token[index], position, num_tokens, head, keys)

        def produce():
            plgpu.set_max_registers(registers[0], action="decrease")

            def begin_item(i):
                return read_item(i).keys

            ring.send_all(count_items(), begin_item, Pages(cache_ref, tables_ref), blocks)

        def load_last_seen(first_token):
            """The positions of the last keys that a warpgroup's queries see."""
            rows = pl.ds(first_token, GROUP_TOKENS)
            last = plgpu.load(tiles_ref.last_seen.at[rows], layout=PER_TOKEN, optimized=False)  # pyright: ignore[reportCallIssue]
            return plgpu.layout_cast(last, PER_TOKEN)

        def is_seen(first_query, last_seen):
            """Which keys of a block are seen, by queries from this place of the block on. They see
            the keys up to these places, or up to themselves."""
            # One number per key and one per query: one number per score would need registers that
            # head size 256 does not leave.
            key = over_rows(iota(block_tokens, PER_KEY), GROUP_TOKENS)
            if last_seen is not None and config.sliding_window is None:
                # What nothing uses has no layout that the compiler could find.
                return key <= over_columns(last_seen, block_tokens)
            query = iota(GROUP_TOKENS, PER_TOKEN) + first_query
            seen = key <= over_columns(query if last_seen is None else last_seen, block_tokens)
            if config.sliding_window is not None:
                seen &= key > over_columns(query - config.sliding_window, block_tokens)
            return seen

        def compute():
            plgpu.set_max_registers(registers[1], action="increase")

            def attend_item(carry):
                i, used, item = carry
                head, span = item.head, item.keys
                num_blocks = ring.count_blocks(span)
                # The first query of this warpgroup: its flat position, and its position in the row.
                first_token = item.token + group * GROUP_TOKENS
                first_query = item.position + group * GROUP_TOKENS
                factor = score_factor(scalars_ref.key_scales, span.head, config)

                # The previous item's outputs are in the same memory.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                rows = pl.ds(first_token, GROUP_TOKENS)
                queries[group] = plgpu.load(q_ref.at[rows, head], layout=MATRIX, optimized=False)  # pyright: ignore[reportCallIssue]
                plgpu.commit_smem()

                def attend_block(j, softmax, *, is_masked, has_end):
                    def to_block_scores(products):
                        scores, left = to_unscaled_scores(products, factor, config)
                        if not is_masked:
                            return scores, left
                        last_seen = None
                        if sees_ahead:
                            # Loaded for each block: kept, they would take registers from the loops.
                            last_seen = load_last_seen(first_token) - span.start - j * block_tokens
                        seen = is_seen(first_query - span.start - j * block_tokens, last_seen)
                        return jnp.where(seen, scores, UNSEEN_PRODUCT), left

                    def zero_end():
                        num_tokens = span.end - span.start - j * block_tokens
                        pl.when(group == 0)(lambda: ring.zero_end(blocks, used + j, num_tokens))

                    return turns.attend_block(
                        softmax,
                        queries.at[group],
                        used + j,
                        to_block_scores,
                        zero_end if has_end else None,
                    )

                sink = of_head(scalars_ref.sinks, head, UNSEEN)
                softmax = Softmax.begin(sink, head_size)
                # Every query sees the blocks from `whole` to `masked` completely.
                whole, masked = jnp.int32(0), jnp.int32(0)
                if config.sliding_window is None or has_three_loops:
                    masked = lax.div(first_query + 1 - span.start, jnp.int32(block_tokens))
                    masked = jnp.minimum(masked, num_blocks)
                if has_three_loops:
                    first_key = first_query + GROUP_TOKENS - config.sliding_window
                    whole = jnp.maximum(first_key - span.start, 0) + (block_tokens - 1)
                    whole = lax.div(whole, jnp.int32(block_tokens))
                    # The last loop always has the last block, whose end may need zeros.
                    whole = jnp.minimum(whole, num_blocks - 1)
                    masked = jnp.maximum(masked, whole)

                def attend_blocks(first, last, softmax, **kind):
                    body = functools.partial(attend_block, **kind)
                    return lax.fori_loop(first, last, body, softmax)

                pl.when(group == 1)(turns.take)
                if has_three_loops:
                    softmax = attend_blocks(0, whole, softmax, is_masked=True, has_end=False)
                softmax = attend_blocks(whole, masked, softmax, is_masked=False, has_end=False)
                softmax = attend_blocks(masked, num_blocks, softmax, is_masked=True, has_end=True)
                pl.when(group == 0)(turns.take)
                # Storing the outputs hides the latency of reading the next item.
                next_item = read_item(i + 1)
                # Read again, and not kept in a register meanwhile.
                first_token = read_item(i).token + group * GROUP_TOKENS

                weighted, _, total = softmax
                scale = of_head(scalars_ref.value_scales, span.head, 1.0)
                out = weighted * over_columns(scale / total, head_size)
                _stage_rows(outputs.at[group], out.astype(ring.dtype))
                if moved_outputs is not None:
                    moved = moved_outputs.at[group, pl.ds(_MOVED_BY, GROUP_TOKENS)]
                    store_unoptimized(moved, out.astype(ring.dtype))
                plgpu.commit_smem()
                end = item.position + item.num_tokens if sees_ahead else span.end
                num_tokens = jnp.clip(end - first_query, 0, GROUP_TOKENS)
                _store_rows(outputs, moved_outputs, group, out_ref, head, first_token, num_tokens)
                return i + 1, used + num_blocks, next_item

            def is_item(carry):
                _, _, item = carry
                return item.num_tokens > 0

            lax.while_loop(is_item, attend_item, (jnp.int32(0), jnp.int32(0), read_item(0)))
            plgpu.wait_smem_to_gmem(0)

        pl.when(group < NUM_GROUPS)(compute)
        pl.when(group == NUM_GROUPS)(produce)

    matrix = (NUM_GROUPS, GROUP_TOKENS, head_size)
    scratch: dict[str, Any] = dict(
        blocks=ring.scratch(),
        # A warpgroup's outputs replace its own queries in the same memory. Interpret mode would
        # take the two parts of a union for one, and report a race.
        queries_or_outputs=(_pair if interpret else plgpu.RefUnion)(
            plgpu.SMEM(matrix, ring.dtype, transforms=operand_transforms(head_size, ring.dtype)),
            plgpu.SMEM(matrix, ring.dtype, transforms=_row_transforms(head_size, ring.dtype)),
        ),
        turn=plgpu.Barrier(num_arrivals=NUM_GROUPS),
    )
    if 2 * head_size * jnp.dtype(ring.dtype).itemsize % _STORE_ALIGNMENT:
        # Without a swizzle: stores to a part count its places from the part's own beginning, and
        # the copy engine from the beginning of shared memory.
        scratch["moved_outputs"] = plgpu.SMEM(
            (NUM_GROUPS, GROUP_TOKENS + _MOVED_BY, head_size), ring.dtype
        )
    if interpret:
        scratch["weights"] = weights_scratch(ring)
    plgpu.kernel(
        kernel,
        out_type=(),
        grid=(num_workers,),
        grid_names=("worker",),
        num_threads=NUM_GROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        # Rows of scores are reduced within warps, which needs no scratch.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="paged_prefill",
    )(
        q,
        cache,
        block_tables,
        tiles,
        scalars,
        out,
    )


def _stage_rows(target, x):
    """Write a warpgroup's outputs to the memory from which `_store_rows` copies them."""
    if _row_transforms(x.shape[-1], x.dtype):
        target[...] = x
    else:
        # Bank conflicts are unavoidable without tiles.
        store_unoptimized(target, x)


def _store_rows(source, moved, group, out_ref, head, token, num_tokens):
    """Start to store the first `num_tokens` rows of a warpgroup's outputs.

    `moved` has them _MOVED_BY rows further on; it is None if every second row begins well.
    """

    def store(source, row, size, done):
        plgpu.copy_smem_to_gmem(
            source.at[pl.ds(row, size)],
            out_ref.at[pl.ds(token + done, size), head],
            commit_group=False,
        )

    for size in (64, 32, 16, 8, 4, 2, 1):
        done = num_tokens & (-2 * size)
        # JAX 0.11.2 cannot combine a group known only at run time with a dynamic slice.
        for g in range(NUM_GROUPS):
            is_stored = ((num_tokens & size) != 0) & (group == g)
            if moved is None or size > 1:
                pl.when(is_stored)(functools.partial(store, source.at[g], done, size, done))
                continue
            is_moved = (done & _MOVED_BY) != 0
            pl.when(is_stored & ~is_moved)(functools.partial(store, source.at[g], done, 1, done))
            row = done + _MOVED_BY
            pl.when(is_stored & is_moved)(functools.partial(store, moved.at[g], row, 1, done))

    plgpu.commit_smem_to_gmem_group()


def _row_transforms(width: int, dtype):
    """A layout in shared memory from which single rows can be stored."""
    if width % 256 == 0:
        # No swizzle of such long rows avoids bank conflicts of a warp's stores to several rows.
        return ()
    columns = operand_columns(width)
    return smem_transforms((1, columns), columns * jnp.dtype(dtype).itemsize)


def _pair(a, b):
    return a, b

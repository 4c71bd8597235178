"""Decode attention on Hopper GPUs: rows with one or a few query tokens against their contexts.

Such a row reads every key and value of its context once and does few products per byte. So only
memory bandwidth matters: the keys are split evenly over all multiprocessors (`gpu_worklist`), and a
producer warpgroup keeps several blocks in flight (`gpu_blocks`).

One warpgroup computes. Its matrix instruction needs 64 rows in one operand and a multiple of 8
columns in the other. The keys are the wide operand, and the few queries that share a kv head are
the narrow one. So scores are [keys, columns] and outputs are [head size, columns]. Padding the
queries to 64 rows instead would cost eight times the products.

The columns of a decode are its query heads, padded to a multiple of 8. Those of a *short row* are
its query heads times SHORT_ROW tokens. The items of decodes come first, and a loop of their own
computes them, so they do not pay for the wider columns; only programs that are not `decode_only`
have the second loop. The two loops differ in three ways:
- a decode's token sees all keys of its row; in a short row each token has its own limits;
- the producer copies a decode's queries to shared memory; those of a short row begin anywhere in
  the flat batch, which tiled copies do not allow, so the compute warpgroup loads them. That exposes
  the latency of two loads per item. The ring fills meanwhile, so the memory is not idle;
- a decode has a sum of weights for each key of a block; they are added up at the end of an item. 64
  columns would need too many registers for that, so a short row's are added up for each block.

Each item of work makes a partial softmax in float32. A second kernel merges those of a row
(`gpu_merge`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.compat import store_unoptimized
from jaxllm_kernels.ragged_paged_attention.api import SHORT_ROW, AttentionConfig
from jaxllm_kernels.ragged_paged_attention.gpu_blocks import (
    KEYS,
    VALUES,
    BlockRing,
    Pages,
    Span,
    operand_columns,
    operand_transforms,
)
from jaxllm_kernels.ragged_paged_attention.gpu_merge import (
    MATRIX,
    PANEL,
    PER_COLUMN,
    Partials,
    merge,
    over_rows,
    panels_of,
)
from jaxllm_kernels.ragged_paged_attention.gpu_softmax import (
    UNSEEN,
    HeadScalars,
    score_factor,
    to_scores,
)
from jaxllm_kernels.ragged_paged_attention.gpu_tuning import (
    Tuning,
    num_query_slots,
    num_short_parts,
    padded_group_size,
    reduction_bytes,
    short_heads,
)
from jaxllm_kernels.ragged_paged_attention.gpu_worklist import (
    DecodeItem,
    DecodeSplit,
    DecodeWork,
    Shares,
)

# Per thread. The two warpgroups start with 240 each. If the sum is larger, one waits forever.
_PRODUCER_REGISTERS = 88
_COMPUTE_REGISTERS = 240

_PER_KEY = plgpu.Layout.WGMMA.reduce(1)


def decode(
    grouped: jax.Array,
    q: jax.Array | None,
    cache: jax.Array,
    block_tables: jax.Array,
    work: DecodeWork,
    scalars: HeadScalars,
    out: jax.Ref,
    *,
    config: AttentionConfig,
    split: DecodeSplit,
    tuning: Tuning,
    interpret: Any,
) -> None:
    """Write the attention of the batch's decodes and short rows to their rows of out [T, N, H].

    The queries of decodes, which are the first rows, are [R, K, C, H] (`group_heads`). Those of
    short rows, unless the batch is decode_only, are among all queries, [T, N, H] with SHORT_ROW - 1
    or more rows after the last token.
    """
    num_rows = grouped.shape[0]
    ring = BlockRing.of(tuning, cache=cache, dtype=grouped.dtype, num_readers=1)
    # A short row has at least two tokens.
    num_short = min(num_rows, out.shape[0] // 2)
    partials = _attend_items(
        grouped,
        None if work.short is None else q,
        cache,
        block_tables,
        work,
        scalars.key_scales,
        config=config,
        split=split,
        ring=ring,
        num_short=num_short,
        interpret=interpret,
    )
    merge(
        *partials,
        work,
        scalars,
        out,
        num_rows=num_rows,
        config=config,
        split=split,
        interpret=interpret,
    )


def group_heads(q: jax.Array, config: AttentionConfig) -> jax.Array:
    """Queries [R, N, H] as [R, K, C, H], the columns of decodes."""
    grouped = q.reshape(q.shape[0], config.num_kv_heads, -1, config.head_size)
    padding = (0, padded_group_size(config) - grouped.shape[2])
    return jnp.pad(grouped, ((0, 0), (0, 0), padding, (0, 0)))


def _attend_items(
    grouped: jax.Array,
    q: jax.Array | None,
    cache: jax.Array,
    block_tables: jax.Array,
    work: DecodeWork,
    key_scales: jax.Array | None,
    *,
    config: AttentionConfig,
    split: DecodeSplit,
    ring: BlockRing,
    num_short: int,
    interpret: Any,
) -> tuple[Partials, Partials | None]:
    """Compute the partial softmaxes of all items: those of decodes, and those of short rows."""
    num_workers = split.num_workers
    num_rows, num_kv_heads, num_columns, head_size = grouped.shape
    group_size = config.num_heads // num_kv_heads
    part_size, num_parts = short_heads(config), num_short_parts(config)
    has_short = work.short is not None
    short_columns = part_size * SHORT_ROW if has_short else 0
    block_tokens = ring.block_tokens
    panels = panels_of(head_size)
    query_slots = num_query_slots(ring.num_staged)

    def kernel(
        queries_ref,
        short_queries_ref,
        cache_ref,
        tables_ref,
        work_ref: DecodeWork,
        key_scales_ref: Any,
        decodes_ref,
        short_ref,
        *,
        blocks,
        queries,
        weights,
        query_full,
        query_free,
        short_queries: Any = None,
    ):
        worker = lax.axis_index("worker")

        def read_shares() -> Shares:
            # Read again for every item: registers are scarce while its blocks are used.
            return split.shares(work_ref)

        def read_pairs():
            """The numbers of this worker's pairs: the first, that of short rows, the end.

            Each is an item. Those of decodes come first, and only they have their queries in slots.
            """
            first, last = work_ref.first_pair[worker], work_ref.last_pair[worker]
            if not has_short:
                return first, last, last
            return first, jnp.clip(read_shares().first_short, first, last), last

        def read_item(i) -> DecodeItem:
            return split.item(work_ref, read_shares(), worker, i)

        def span_of(item: DecodeItem) -> Span:
            return Span(item.pair.row, item.pair.head, item.start, item.end)

        def produce():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            first, first_short, last = read_pairs()

            def send_queries(i, item):
                slot = lax.rem(i, query_slots)

                @pl.when(i >= query_slots)
                def _():
                    plgpu.barrier_wait(query_free.at[slot])

                source = queries_ref.at[item.pair.row, item.pair.head]
                plgpu.copy_gmem_to_smem(source, queries.at[slot], query_full.at[slot])

            def begin_item(i):
                item = read_item(first + i)
                if has_short:
                    pl.when(first + i < first_short)(lambda: send_queries(i, item))
                else:
                    send_queries(i, item)
                return span_of(item)

            ring.send_all(last - first, begin_item, Pages(cache_ref, tables_ref), blocks)
            num_decodes = first_short - first
            for age in range(query_slots, 0, -1):

                @pl.when(num_decodes >= age)
                def _(age=age):
                    plgpu.barrier_wait(query_free.at[lax.rem(num_decodes - age, query_slots)])

        def compute():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

            def attend_blocks(item, used, queries, is_seen, total):
                """The outputs, largest scores and sums of weights of an item.

                The sums, zero in `total`, are [C], or [keys of a block, C] to be added up.
                """
                columns = queries.shape[0]
                weights_t = (weights.at[pl.ds(0, columns)] if has_short else weights).T
                factor = score_factor(key_scales_ref, item.pair.head, config)

                def attend_block(j, softmax):
                    weighted, largest, total = softmax
                    keys = ring.wait(blocks, KEYS, used + j)
                    scores = to_scores(_multiply(keys, queries.T), factor, config)
                    ring.release(blocks, KEYS, used + j)

                    first_key = item.start + j * block_tokens
                    scores = jnp.where(is_seen(first_key), scores, UNSEEN)

                    new_largest = jnp.maximum(largest, scores.max(axis=0))
                    decay = jnp.exp2(largest - new_largest)
                    p = jnp.exp2(scores - over_rows(new_largest, block_tokens))
                    if total.ndim == 2:
                        total = total * over_rows(decay, block_tokens) + p
                    else:
                        total = total * decay + p.sum(axis=0)
                    weights_t[...] = plgpu.layout_cast(
                        p.astype(ring.dtype), plgpu.Layout.WGMMA_TRANSPOSED
                    )
                    plgpu.commit_smem()

                    values = ring.wait(blocks, VALUES, used + j)
                    ring.zero_end(blocks, used + j, item.end - first_key)
                    decay = over_rows(decay, PANEL)
                    weighted = tuple(
                        old * decay + _multiply(values.at[:, pl.ds(panel, PANEL)].T, weights_t)
                        for old, panel in zip(weighted, panels, strict=True)
                    )
                    ring.release(blocks, VALUES, used + j)
                    return weighted, new_largest, total

                return lax.fori_loop(
                    jnp.int32(0),
                    ring.count_blocks(span_of(item)),
                    attend_block,
                    (
                        tuple(_filled((PANEL, columns), 0, MATRIX) for _ in panels),
                        _filled((columns,), UNSEEN, PER_COLUMN),
                        total,
                    ),
                )

            def write(partials_ref, i, softmax):
                weighted, largest, total = softmax
                for panel, x in zip(panels, weighted, strict=True):
                    store_unoptimized(partials_ref.weighted.at[i, pl.ds(panel, PANEL)], x)
                store_unoptimized(partials_ref.largest.at[i], largest)
                total = total.sum(axis=0) if total.ndim == 2 else total
                store_unoptimized(partials_ref.total.at[i], total)

            def attend_decode(i, carry):
                # Read the next item early, so that this item's blocks hide the latency.
                item, used = carry
                next_item = read_item(jnp.minimum(i + 1, work_ref.last_pair[worker] - 1))
                slot = lax.rem(i - work_ref.first_pair[worker], query_slots)

                def is_seen(first_key):
                    shape = (block_tokens, num_columns)
                    key = first_key + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=MATRIX)
                    seen = key < item.end
                    if config.sliding_window is not None:
                        seen &= key >= item.first_seen
                    return seen

                plgpu.barrier_wait(query_full.at[slot])
                total = _filled((block_tokens, num_columns), 0, MATRIX)
                softmax = attend_blocks(item, used, queries.at[slot], is_seen, total)
                plgpu.barrier_arrive(query_free.at[slot])
                write(decodes_ref, i + worker, softmax)
                return next_item, used + ring.count_blocks(span_of(item))

            def attend_short(i, used):
                item = read_item(i)
                row, starts = item.pair.row, work_ref.short.query_starts  # pyright: ignore[reportOptionalMemberAccess]
                first_token, end_token = starts[row], starts[row + 1]
                load_short_queries(item.pair.head, item.pair.part, first_token)
                position = work_ref.context_lens[row] - (end_token - first_token)

                def is_seen(first_key):
                    # One number per key and one per column: the compiler does not recognise equal
                    # numbers in a matrix. Columns of tokens that the row does not have may see
                    # garbage, and are never read.
                    shape = (block_tokens, short_columns)
                    token = lax.rem(_iota(short_columns, PER_COLUMN), jnp.int32(SHORT_ROW))
                    query = over_rows(position + token, block_tokens)
                    # A thread has fewer keys than columns, so the keys move with the block.
                    keys = first_key + _iota(block_tokens, _PER_KEY)
                    key = lax.broadcast_in_dim(keys, shape, [0])
                    if config.sliding_window is None:
                        return key <= query
                    # Negative distances are large without a sign.
                    distance = lax.bitcast_convert_type(query - key, jnp.uint32)
                    return distance < jnp.uint32(config.sliding_window)

                total = _filled((short_columns,), 0, PER_COLUMN)
                softmax = attend_blocks(item, used, short_queries, is_seen, total)
                write(short_ref, i - read_shares().first_short + worker, softmax)
                return used + ring.count_blocks(span_of(item))

            def load_short_queries(kv_head, part, first_token):
                tokens = pl.ds(first_token, SHORT_ROW)
                first_head = part * part_size

                def load(i):
                    # The last part may have fewer heads; its columns repeat the last one.
                    head = kv_head * group_size + jnp.minimum(first_head + i, group_size - 1)
                    source = short_queries_ref.at[tokens, head]
                    return plgpu.load(source, layout=_query_layout(head_size), optimized=False)  # pyright: ignore[reportCallIssue]

                for i, x in enumerate([load(i) for i in range(part_size)]):
                    store_unoptimized(short_queries.at[pl.ds(i * SHORT_ROW, SHORT_ROW)], x)
                plgpu.commit_smem()

            first, *_others, last = read_pairs()

            @pl.when(first < last)
            def _():
                carry = read_item(first), jnp.int32(0)
                _, used = lax.fori_loop(first, read_pairs()[1], attend_decode, carry)
                if has_short:
                    lax.fori_loop(*read_pairs()[1:], attend_short, used)

        pl.when(lax.axis_index("warpgroup") == 0)(compute)
        pl.when(lax.axis_index("warpgroup") == 1)(produce)

    def operand(*shape):
        # Both operands of a product must have the same swizzle.
        return plgpu.SMEM(shape, ring.dtype, transforms=operand_transforms(head_size, ring.dtype))

    scratch: dict[str, Any] = dict(
        blocks=ring.scratch(),
        queries=operand(query_slots, num_columns, head_size),
        query_full=plgpu.Barrier(num_barriers=query_slots),
        query_free=plgpu.Barrier(num_barriers=query_slots),
    )
    of_short = None
    if has_short:
        scratch["short_queries"] = operand(short_columns, head_size)
        most_items = num_short * num_kv_heads * num_parts + num_workers - 1
        of_short = Partials.shapes(most_items, head_size, short_columns)
    scratch["weights"] = operand(max(num_columns, short_columns), block_tokens)
    most_items = num_rows * num_kv_heads + num_workers - 1
    return plgpu.kernel(
        kernel,
        out_type=(Partials.shapes(most_items, head_size, num_columns), of_short),
        grid=(num_workers,),
        grid_names=("worker",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=reduction_bytes(max(num_columns, short_columns), head_size),
        ),
        interpret=interpret,
        kernel_name="paged_decode",
    )(grouped, q, cache, block_tables, work, key_scales)


def _multiply(a, b):
    """The product of two matrices in shared memory, float32 in registers."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def _filled(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _iota(size: int, layout):
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def _query_layout(head_size: int):
    """The registers for a short row's queries [SHORT_ROW, H] of a head on their way to memory.

    In each tile of the operand a warp has two tokens, and a thread adjacent numbers of one token.
    """
    columns = operand_columns(head_size)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((SHORT_ROW, columns), (2, columns), (columns // 16,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )

"""Decode attention on Hopper GPUs: one query token per row against its paged context.

A decode reads every key and value of its context once and does two products per byte. So only
memory bandwidth matters: the keys are split evenly over all multiprocessors (`gpu_worklist`), and a
producer warpgroup keeps several blocks in flight (`gpu_blocks`).

One warpgroup computes. Its matrix instruction needs 64 rows in one operand and a multiple of 8 in
the other. The keys are the wide operand, and the few query heads that share a kv head are the
narrow one. So scores are [keys, heads] and outputs are [head size, heads]. Padding the queries to
64 rows instead would cost eight times the products.

Each item of work makes a partial softmax in float32. A second kernel merges those of a row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.compat import store_unoptimized
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig
from jaxllm_kernels.ragged_paged_attention.gpu_blocks import (
    KEYS,
    VALUES,
    BlockRing,
    Span,
    operand_transforms,
)
from jaxllm_kernels.ragged_paged_attention.gpu_softmax import UNSEEN, HeadScalars, to_scores
from jaxllm_kernels.ragged_paged_attention.gpu_tuning import Tuning, num_query_slots
from jaxllm_kernels.ragged_paged_attention.gpu_worklist import DecodeItems, DecodeWork

# Per thread. The two warpgroups start with 240 each. If the sum is larger, one waits forever.
_PRODUCER_REGISTERS = 88
_COMPUTE_REGISTERS = 240

_MATRIX = plgpu.Layout.WGMMA
_PER_HEAD = plgpu.Layout.WGMMA.reduce(0)


class Partials(NamedTuple):
    """Unnormalised softmaxes over the keys of each item; G is the padded group size."""

    weighted: jax.Array  # float32 [W, H, G]
    largest: jax.Array  # float32 [W, G]
    total: jax.Array  # float32 [W, G]


def decode(
    q: jax.Array,
    cache: jax.Array,
    block_tables: jax.Array,
    work: DecodeWork,
    scalars: HeadScalars,
    out: jax.Ref,
    *,
    config: AttentionConfig,
    tuning: Tuning,
    interpret: Any,
) -> None:
    """Write the attention of queries [R, K, G, H] to the first rows of out [T, N, H].

    G is the padded group size; the sinks are [K, G]. Rows without work are not written.
    """
    ring = BlockRing.of(tuning, cache=cache, dtype=q.dtype, num_readers=1)
    partials = _attend_items(q, cache, block_tables, work, scalars, config, ring, interpret)
    _merge(partials, work, scalars, out, num_rows=q.shape[0], config=config, interpret=interpret)


def _attend_items(
    q: jax.Array,
    cache: jax.Array,
    block_tables: jax.Array,
    work: DecodeWork,
    scalars: HeadScalars,
    config: AttentionConfig,
    ring: BlockRing,
    interpret: Any,
) -> Partials:
    """Compute the partial softmax of every item."""
    num_items = work.items.row.shape[0]
    num_workers = work.worker_items.shape[0] - 1
    group_size, head_size = q.shape[2:]
    block_tokens = ring.block_tokens
    panels = _panels(head_size)
    query_slots = num_query_slots(ring.num_staged)

    def kernel(
        q_ref,
        cache_ref,
        tables_ref,
        items_ref,
        worker_items_ref,
        factors_ref,
        weighted_ref,
        largest_ref,
        total_ref,
        *,
        blocks,
        queries,
        weights,
        query_full,
        query_free,
    ):
        worker = lax.axis_index("worker")
        first, last = worker_items_ref[worker], worker_items_ref[worker + 1]

        def read_item(i) -> DecodeItems:
            return DecodeItems(*(ref[i] for ref in items_ref))

        def produce():
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

            def begin_item(i):
                item = read_item(first + i)
                slot = lax.rem(i, query_slots)

                @pl.when(i >= query_slots)
                def _():
                    plgpu.barrier_wait(query_free.at[slot])

                plgpu.copy_gmem_to_smem(
                    q_ref.at[item.row, item.head], queries.at[slot], query_full.at[slot]
                )
                return Span(item.row, item.head, item.start, item.end)

            ring.send_all(last - first, begin_item, cache_ref, tables_ref, blocks)
            for age in range(query_slots, 0, -1):

                @pl.when(last - first >= age)
                def _(age=age):
                    plgpu.barrier_wait(query_free.at[lax.rem(last - first - age, query_slots)])

        def compute():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")

            def attend_item(i, carry):
                # Read the next item early, so that this item's blocks hide the latency.
                item, used = carry
                next_item = read_item(jnp.minimum(i + 1, num_items - 1))
                slot = lax.rem(i - first, query_slots)
                span = Span(item.row, item.head, item.start, item.end)
                num_blocks = ring.count_blocks(span)
                factor = factors_ref[item.head]
                plgpu.barrier_wait(query_full.at[slot])

                def attend_block(j, softmax):
                    weighted, largest, total = softmax
                    keys = ring.wait(blocks, KEYS, used + j)
                    scores = to_scores(_multiply(keys, queries.at[slot].T), factor, config)
                    ring.release(blocks, KEYS, used + j)

                    first_key = item.start + j * block_tokens
                    key = first_key + plgpu.broadcasted_iota(
                        jnp.int32, scores.shape, 0, layout=_MATRIX
                    )
                    seen = key < item.end
                    if config.sliding_window is not None:
                        seen &= key >= item.first_seen
                    scores = jnp.where(seen, scores, UNSEEN)

                    new_largest = jnp.maximum(largest, scores.max(axis=0))
                    decay = jnp.exp2(largest - new_largest)
                    p = jnp.exp2(scores - _over_rows(new_largest, block_tokens))
                    total = total * _over_rows(decay, block_tokens) + p
                    weights.T[...] = plgpu.layout_cast(
                        p.astype(ring.dtype), plgpu.Layout.WGMMA_TRANSPOSED
                    )
                    plgpu.commit_smem()

                    values = ring.wait(blocks, VALUES, used + j)
                    ring.zero_end(blocks, used + j, item.end - first_key)
                    decay = _over_rows(decay, _PANEL)
                    weighted = tuple(
                        old * decay + _multiply(values.at[:, pl.ds(panel, _PANEL)].T, weights.T)
                        for old, panel in zip(weighted, panels, strict=True)
                    )
                    ring.release(blocks, VALUES, used + j)
                    return weighted, new_largest, total

                def filled(shape, value, layout):
                    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

                weighted, largest, total = lax.fori_loop(
                    jnp.int32(0),
                    num_blocks,
                    attend_block,
                    (
                        tuple(filled((_PANEL, group_size), 0, _MATRIX) for _ in panels),
                        filled((group_size,), UNSEEN, _PER_HEAD),
                        # One sum per key of a block; they are added up at the end.
                        filled((block_tokens, group_size), 0, _MATRIX),
                    ),
                )
                plgpu.barrier_arrive(query_free.at[slot])
                for panel, x in zip(panels, weighted, strict=True):
                    store_unoptimized(weighted_ref.at[i, pl.ds(panel, _PANEL)], x)
                store_unoptimized(largest_ref.at[i], largest)
                store_unoptimized(total_ref.at[i], total.sum(axis=0))
                return next_item, used + num_blocks

            @pl.when(first < last)
            def _():
                lax.fori_loop(first, last, attend_item, (read_item(first), jnp.int32(0)))

        pl.when(lax.axis_index("warpgroup") == 0)(compute)
        pl.when(lax.axis_index("warpgroup") == 1)(produce)

    partial = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    outputs = plgpu.kernel(
        kernel,
        out_type=(
            partial((num_items, head_size, group_size)),
            partial((num_items, group_size)),
            partial((num_items, group_size)),
        ),
        grid=(num_workers,),
        grid_names=("worker",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=dict(
            blocks=ring.scratch(),
            queries=plgpu.SMEM(
                (query_slots, group_size, head_size),
                ring.dtype,
                transforms=operand_transforms(head_size, ring.dtype),
            ),
            weights=plgpu.SMEM(
                (group_size, block_tokens),
                ring.dtype,
                # Both operands of a product must have the same swizzle.
                transforms=operand_transforms(head_size, ring.dtype),
            ),
            query_full=plgpu.Barrier(num_barriers=query_slots),
            query_free=plgpu.Barrier(num_barriers=query_slots),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode",
    )(q, cache, block_tables, work.items, work.worker_items, scalars.score_factors)
    return Partials(*outputs)


def _merge(
    partials: Partials,
    work: DecodeWork,
    scalars: HeadScalars,
    out: jax.Ref,
    *,
    num_rows: int,
    config: AttentionConfig,
    interpret: Any,
) -> None:
    """Merge the partial softmaxes of every row and kv head."""
    num_kv_heads, head_size = config.num_kv_heads, config.head_size
    group_size = config.num_heads // num_kv_heads
    padded_size = partials.largest.shape[1]
    # Panels that do not overlap are merged at the same time: by a thread block each.
    panels_overlap = head_size % _PANEL != 0

    def kernel(partials_ref, first_ref, last_ref, scalars_ref, out_ref, panel_smem):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        pair = row * num_kv_heads + head
        first, last = first_ref[pair], last_ref[pair]

        def merge_panel(panel):
            def merge_item(i, softmax):
                weighted, largest, total = softmax
                item_largest = _load(partials_ref.largest.at[i], _PER_HEAD)
                item_total = _load(partials_ref.total.at[i], _PER_HEAD)
                item_weighted = _load(partials_ref.weighted.at[i, pl.ds(panel, _PANEL)], _MATRIX)
                new_largest = jnp.maximum(largest, item_largest)
                decay, item_decay = (jnp.exp2(x - new_largest) for x in (largest, item_largest))
                return (
                    weighted * _over_rows(decay, _PANEL)
                    + item_weighted * _over_rows(item_decay, _PANEL),
                    new_largest,
                    total * decay + item_total * item_decay,
                )

            sink = _load(scalars_ref.sinks.at[head], _PER_HEAD)
            zeros = plgpu.layout_cast(jnp.zeros((_PANEL, padded_size), jnp.float32), _MATRIX)
            weighted, _, total = lax.fori_loop(
                first, last, merge_item, (zeros, sink, jnp.ones_like(sink))
            )
            merged = weighted * _over_rows(scalars_ref.value_scales[head] / total, _PANEL)
            if panels_overlap:
                # They must be written one after the other.
                plgpu.wait_smem_to_gmem(0)
            store_unoptimized(
                panel_smem.T,
                plgpu.layout_cast(merged.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED),
            )
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                panel_smem.at[pl.ds(0, group_size)],
                out_ref.at[row, pl.ds(head * group_size, group_size), pl.ds(panel, _PANEL)],
            )

        @pl.when(first < last)
        def _():
            if panels_overlap:
                for panel in _panels(head_size):
                    merge_panel(panel)
            else:
                merge_panel(pl.multiple_of(lax.axis_index("panel") * _PANEL, _PANEL))
            plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        kernel,
        out_type=(),
        grid=(num_rows, num_kv_heads, 1 if panels_overlap else head_size // _PANEL),
        grid_names=("row", "head", "panel"),
        scratch_types=[plgpu.SMEM((padded_size, _PANEL), out.dtype)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="merge_decode",
    )(partials, work.pair_first, work.pair_last, scalars, out)


# Rows of an output per matrix instruction. If the head size is not a multiple, the last panel
# overlaps the one before; both then compute the same values.
_PANEL = 64


def _panels(head_size: int) -> list[int]:
    """The first row of every panel."""
    return [min(row, head_size - _PANEL) for row in range(0, head_size, _PANEL)]


def _multiply(a, b):
    """The product of two matrices in shared memory, float32 in registers."""

    def run(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((a.shape[0], b.shape[1]), jnp.float32))


def _over_rows(x, num_rows: int):
    """x [G] as every row of a [num_rows, G]."""
    return lax.broadcast_in_dim(x, (num_rows, *x.shape), [1])


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

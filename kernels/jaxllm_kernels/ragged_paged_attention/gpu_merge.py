"""Merges the partial softmaxes that the decode kernel makes on Hopper GPUs.

The keys of a row and kv head are cut into items (`gpu_worklist`). For each item the decode kernel
writes a partial result [head size, columns] in float32. A column is a query: a query head of a
decode's token, or, of a short row, a query head and a token. This kernel adds up the items of a
pair and writes the result to the flat batch.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.compat import store_unoptimized
from jaxllm_kernels.ragged_paged_attention.api import SHORT_ROW, AttentionConfig
from jaxllm_kernels.ragged_paged_attention.gpu_softmax import UNSEEN, HeadScalars, of_head
from jaxllm_kernels.ragged_paged_attention.gpu_tuning import (
    num_short_parts,
    padded_group_size,
    short_heads,
)
from jaxllm_kernels.ragged_paged_attention.gpu_worklist import DecodeSplit, DecodeWork, Pair

MATRIX = plgpu.Layout.WGMMA
PER_COLUMN = plgpu.Layout.WGMMA.reduce(0)

# Rows of an output per matrix instruction. If the head size is not a multiple, the last panel
# overlaps the one before; both then compute the same values.
PANEL = 64


class Partials(NamedTuple):
    """Unnormalised softmaxes over the keys of each item; C columns."""

    weighted: jax.Array  # float32 [W, H, C]
    largest: jax.Array  # float32 [W, C]
    total: jax.Array  # float32 [W, C]

    @classmethod
    def shapes(cls, num_items: int, head_size: int, num_columns: int) -> "Partials":
        """The shapes for a number of items."""
        shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        per_column = shape((num_items, num_columns))
        return cls(shape((num_items, head_size, num_columns)), per_column, per_column)  # pyright: ignore[reportArgumentType]


def panels_of(head_size: int) -> list[int]:
    """The first row of every panel."""
    return [min(row, head_size - PANEL) for row in range(0, head_size, PANEL)]


def over_rows(x, num_rows: int):
    """x [C] as every row of a [num_rows, C]."""
    return lax.broadcast_in_dim(x, (num_rows, *x.shape), [1])


def merge(
    decodes: Partials,
    short: Partials | None,
    work: DecodeWork,
    scalars: HeadScalars,
    out: jax.Ref,
    *,
    num_rows: int,
    config: AttentionConfig,
    split: DecodeSplit,
    interpret: Any,
) -> None:
    """Merge the partial softmaxes of every row, kv head and part of its query heads."""
    num_kv_heads, head_size = config.num_kv_heads, config.head_size
    group_size = config.num_heads // num_kv_heads
    padded_size = padded_group_size(config)
    part_size = short_heads(config)
    num_parts = 1 if short is None else num_short_parts(config)
    last_part_size = group_size - (num_parts - 1) * part_size
    # Panels that do not overlap are merged at the same time: by a thread block each.
    panels_overlap = head_size % PANEL != 0

    def kernel(
        decodes_ref,
        short_ref,
        work_ref: DecodeWork,
        scales_ref: Any,
        sinks_ref: Any,
        out_ref,
        **smem,
    ):
        row, head = lax.axis_index("row"), lax.axis_index("head")
        part = jnp.int32(0)
        if num_parts > 1:
            part = lax.div(head, jnp.int32(num_kv_heads))
            head = lax.rem(head, jnp.int32(num_kv_heads))
        # The partial results of the pair.
        shares, pair = split.shares(work_ref), Pair(row, head, part)
        first_worker, last_worker = split.workers(work_ref, shares, pair)
        number = split.number(shares, pair)
        first, last = number + first_worker, number + last_worker

        def no_sinks(num_columns):
            return plgpu.layout_cast(jnp.full(num_columns, UNSEEN, jnp.float32), PER_COLUMN)

        def add_up(partials_ref, first, last, sink, panel):
            """The outputs [PANEL, C] of a pair."""

            def add_item(i, softmax):
                weighted, largest, total = softmax
                item_largest = _load(partials_ref.largest.at[i], PER_COLUMN)
                item_total = _load(partials_ref.total.at[i], PER_COLUMN)
                item_weighted = _load(partials_ref.weighted.at[i, pl.ds(panel, PANEL)], MATRIX)
                new_largest = jnp.maximum(largest, item_largest)
                decay, item_decay = (jnp.exp2(x - new_largest) for x in (largest, item_largest))
                return (
                    weighted * over_rows(decay, PANEL)
                    + item_weighted * over_rows(item_decay, PANEL),
                    new_largest,
                    total * decay + item_total * item_decay,
                )

            zeros = plgpu.layout_cast(jnp.zeros((PANEL, sink.shape[0]), jnp.float32), MATRIX)
            weighted, _, total = lax.fori_loop(
                first, last, add_item, (zeros, sink, jnp.ones_like(sink))
            )
            merged = weighted * over_rows(of_head(scales_ref, head, 1.0) / total, PANEL)
            if panels_overlap:
                # They must be written one after the other.
                plgpu.wait_smem_to_gmem(0)
            return plgpu.layout_cast(merged.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)

        def merge_decode(panel):
            panel_smem = smem["panel"]
            sink = no_sinks(padded_size)
            if sinks_ref is not None:
                sink = _load(sinks_ref[0].at[head], PER_COLUMN)
            merged = add_up(decodes_ref, first, last, sink, panel)
            store_unoptimized(panel_smem.T, merged)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                panel_smem.at[pl.ds(0, group_size)],
                out_ref.at[row, pl.ds(head * group_size, group_size), pl.ds(panel, PANEL)],
            )

        def merge_short(panel):
            tokens_smem = smem["tokens"]
            first_item = shares.first_short
            sink = no_sinks(part_size * SHORT_ROW)
            if sinks_ref is not None:
                sink = _load(sinks_ref[1].at[head, part], PER_COLUMN)
            merged = add_up(short_ref, first - first_item, last - first_item, sink, panel)
            for i in range(part_size):
                tokens = merged[:, i * SHORT_ROW : (i + 1) * SHORT_ROW]
                store_unoptimized(tokens_smem.at[:, i].T, tokens)
            plgpu.commit_smem()
            first_head = head * group_size + part * part_size

            starts = work_ref.short.query_starts  # pyright: ignore[reportOptionalMemberAccess]
            first_token, end = starts[row], starts[row + 1]

            def store(num_heads):
                def store_token(token, _):
                    plgpu.copy_smem_to_gmem(
                        tokens_smem.at[token - first_token, pl.ds(0, num_heads)],
                        out_ref.at[token, pl.ds(first_head, num_heads), pl.ds(panel, PANEL)],
                    )

                lax.fori_loop(first_token, end, store_token, None)

            if last_part_size == part_size:
                store(part_size)
            else:
                is_last = part == num_parts - 1
                pl.when(~is_last)(lambda: store(part_size))
                pl.when(is_last)(lambda: store(last_part_size))

        def merge_panels(merge_panel):
            if panels_overlap:
                for panel in panels_of(head_size):
                    merge_panel(panel)
            else:
                merge_panel(pl.multiple_of(lax.axis_index("panel") * PANEL, PANEL))
            plgpu.wait_smem_to_gmem(0)

        has_items = first < last
        if short is None:
            pl.when(has_items)(lambda: merge_panels(merge_decode))
        else:
            is_short = row * num_kv_heads >= shares.first_short
            # A decode has one part.
            pl.when(has_items & ~is_short & (part == 0))(lambda: merge_panels(merge_decode))
            pl.when(has_items & is_short)(lambda: merge_panels(merge_short))

    smem: dict[str, Any] = dict(panel=plgpu.SMEM((padded_size, PANEL), out.dtype))
    if short is not None:
        smem["tokens"] = plgpu.SMEM((SHORT_ROW, part_size, PANEL), out.dtype)
    column_sinks = None
    if scalars.sinks is not None:
        # By kv head, and for short rows by part: the sink of each column.
        sinks = scalars.sinks.reshape(num_kv_heads, group_size)
        padding = ((0, 0), (0, padded_size - group_size))
        column_sinks = [jnp.pad(sinks, padding, constant_values=UNSEEN)]
        if short is not None:
            padding = ((0, 0), (0, part_size - last_part_size))
            of_parts = jnp.pad(sinks, padding, constant_values=UNSEEN)
            of_parts = of_parts.reshape(num_kv_heads, num_parts, part_size)
            column_sinks.append(jnp.repeat(of_parts, SHORT_ROW, axis=-1))
    plgpu.kernel(
        kernel,
        out_type=(),
        grid=(
            num_rows,
            num_kv_heads * num_parts,
            1 if panels_overlap else head_size // PANEL,
        ),
        grid_names=("row", "head", "panel"),
        scratch_types=smem,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="merge_decode",
    )(
        decodes,
        short,
        work,
        scalars.value_scales,
        column_sinks,
        out,
    )


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

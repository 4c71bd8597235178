"""A step of the TPU kernels for decodes and short rows: each segment is a whole row.

The last items of a segment contain the places of its own tokens. The kernel inserts their keys and
values on chip, where the segment reads them, and then copies the tiles of tokens around them back
to the cache. A row writes only pages of its own, so rows never wait for each other: a tile is
copied from its own buffer, and the kernel waits for it two tiles later.

A row costs what its length needs: a decode is computed by code for one token, which alone is there
if all rows are decodes. Other rows are computed by code for SHORT_ROW tokens, because the time in
which pages are read hides them, too.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.ragged_paged_attention.api import SHORT_ROW, AttentionConfig
from jaxllm_kernels.ragged_paged_attention.tpu_items import Items, Pages
from jaxllm_kernels.ragged_paged_attention.tpu_layout import sublane_tile
from jaxllm_kernels.ragged_paged_attention.tpu_outputs import Outputs, OutputScratch
from jaxllm_kernels.ragged_paged_attention.tpu_primitives import (
    Ref,
    cast,
    cdiv,
    divide,
    for_each,
    multiple_of,
    remainder,
)
from jaxllm_kernels.ragged_paged_attention.tpu_row import Row, RowScratch
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import KernelSizes


class DecodeScratch(NamedTuple):
    """On-chip memory with the lifetime of the call."""

    written: Ref  # [2, K, sublane tile, W]: tiles that are copied back
    num_sent: Ref  # int32 [1]: tiles that have been sent
    sent: Ref  # semaphores [2]
    softmax: RowScratch
    outputs: OutputScratch | None  # with short rows

    @classmethod
    def shapes(
        cls,
        sizes: KernelSizes,
        slots: jax.ShapeDtypeStruct,
        group_size: int,
        dtype: jnp.dtype,
    ) -> "DecodeScratch":
        _, heads, _, width = slots.shape
        has_short, outputs = sizes.kind == "short", (heads, group_size, sizes.layout.value_lanes)
        return cls(
            written=pltpu.VMEM((2, heads, sublane_tile(slots.dtype), width), slots.dtype),
            num_sent=pltpu.SMEM((1,), jnp.int32),
            sent=pltpu.SemaphoreType.DMA((2,)),
            softmax=RowScratch.shapes(heads, sizes.lines(group_size), sizes),
            outputs=OutputScratch.shapes(sizes, outputs, dtype) if has_short else None,
        )


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """A step of the grid, during tracing."""

    items: Items
    # The step's part of the operand; likewise `new`.
    q: Ref  # [tokens, K, G, D]
    new: Ref  # [tokens, K, W]
    kv_scales: Ref | None  # [K, 1, 2]
    sinks: Ref | None  # [K, G, 1]
    # The step's part, or with short rows the whole: [T, all heads, G, V].
    out: Ref
    scratch: DecodeScratch
    config: AttentionConfig
    sizes: KernelSizes

    def start(self) -> None:
        """Prepare for the first step."""
        self.scratch.num_sent[0] = 0
        if self.sizes.kind == "short":
            self._outputs().start()

    def finish(self) -> None:
        """Wait for what is left after the last step."""
        num_sent = self.scratch.num_sent[0]
        for i in (1, 2):
            copy = self._tile_copy(0, 0, remainder(num_sent + i, 2))
            pl.when(num_sent >= i)(copy.wait)
        if self.sizes.kind == "short":
            self._outputs().finish()

    def attend(self, step: jax.Array, first: jax.Array, end: jax.Array) -> None:
        """Compute the segments of a step. Outputs of no segment are zero; if there are short rows,
        they are not written."""
        if self.sizes.kind == "short":
            self._attend_with_short_rows(step, first, end)
            return

        def attend_decode(segment: jax.Array) -> None:
            token = self.items.offset(segment)
            row = self._row(
                segment, num_tokens=1, first_token=token, first_output=token, out=self.out
            )
            self._attend_row(row)

        self.out[...] = jnp.zeros_like(self.out)
        for_each(first, end, attend_decode)

    def _attend_with_short_rows(self, step: jax.Array, first: jax.Array, end: jax.Array) -> None:
        """Compute the decodes of a step, which come first, and then the short rows."""
        work, outputs = self.items.work, self._outputs()
        assert work.num_decodes is not None
        window_start = self.sizes.window_start(step)
        # (The index of the first segment is past the end if there is none.)
        start = work.tokens[jnp.minimum(first, work.tokens.shape[0] - 1)]

        def attend_row(segment: jax.Array, *, num_tokens: int) -> None:
            row = self._row(
                segment,
                num_tokens=num_tokens,
                first_token=work.tokens[segment] - window_start,
                first_output=work.tokens[segment] - start,
                out=outputs.of_step(),
            )
            self._attend_row(row)

        attend_decode = functools.partial(attend_row, num_tokens=1)
        attend_short = functools.partial(attend_row, num_tokens=SHORT_ROW)
        num_decodes = work.num_decodes[0]
        outputs.open()
        for_each(first, jnp.minimum(end, num_decodes), attend_decode)
        for_each(jnp.maximum(first, num_decodes), end, attend_short)
        last = jnp.maximum(end - 1, 0)
        num_tokens = work.tokens[last] + work.lengths[last] - start
        outputs.send(start, jnp.where(first < end, num_tokens, 0))

    def _row(
        self,
        segment: jax.Array,
        *,
        num_tokens: int,
        first_token: jax.Array,
        first_output: jax.Array,
        out: Ref,
    ) -> Row:
        return Row(
            items=self.items,
            segment=segment,
            num_tokens=num_tokens,
            first_token=first_token,
            first_output=first_output,
            q=self.q,
            kv_scales=self.kv_scales,
            sinks=self.sinks,
            out=out,
            scratch=self.scratch.softmax,
            config=self.config,
            sizes=self.sizes,
        )

    def _attend_row(self, row: Row) -> None:
        """Compute a row."""
        items = self.items
        row.start()
        num_items = items.num_items(row.segment)

        def attend_item(item: jax.Array) -> None:
            slot = items.take_slot()
            items.fetch_next()
            pages = items.pages(row.segment, item)
            items.wait(pages, slot)
            if row.num_tokens == 1:
                pl.when(item == num_items - 1)(lambda: self._insert_token(row, pages, slot))
            else:
                self._insert_tokens(row, pages, slot)
            row.attend_pages(pages, slot)

        for_each(0, num_items, attend_item)
        row.store_output()

    def _outputs(self) -> Outputs:
        assert self.scratch.outputs is not None
        return Outputs(
            scratch=self.scratch.outputs, out=self.out, first_head=self.items.first_head()
        )

    def _insert_token(self, row: Row, pages: Pages, slot: jax.Array) -> None:
        """Insert a decode's key and value into the slot of its last pages, and send them."""
        tile = self.scratch.written.shape[2]
        position = row.position
        self._insert_into_tile(row, pages, slot, position - remainder(position, tile))

    def _insert_tokens(self, row: Row, pages: Pages, slot: jax.Array) -> None:
        """Insert the keys and values whose places are in a slot, and send them.

        The tokens may lie over two tiles, which may be in two pages and in two slots.
        """
        tile, block_size = self.scratch.written.shape[2], self.items.block_size
        first = jnp.maximum(pages.first * block_size, row.position & -tile)
        end = jnp.minimum(pages.end * block_size, row.end)

        def insert(index: jax.Array) -> None:
            self._insert_into_tile(row, pages, slot, first + index * tile)

        for_each(0, cdiv(jnp.maximum(end - first, 0), tile), insert)

    def _insert_into_tile(self, row: Row, pages: Pages, slot: jax.Array, start: jax.Array) -> None:
        """Insert a row's keys and values into the tile of tokens from position `start` on, which is
        in a slot, and send the tile."""
        items, scratch, tile = self.items, self.scratch, self.scratch.written.shape[2]
        in_slot = pl.ds(multiple_of(start - pages.first * items.block_size, tile), tile)
        merged = items.slots[slot, :, in_slot, :].astype(jnp.float32)
        rows = lax.broadcasted_iota(jnp.int32, (1, tile, 1), 1)
        for i in range(row.num_tokens):
            new = self.new[row.token(i)].astype(jnp.float32)  # [K, W]
            new = jnp.stack([new[head : head + 1] for head in range(items.num_heads)])
            merged = jnp.where(rows == row.place(i) - start, new, merged)
        merged = cast(merged, items.cache.dtype)
        items.slots[slot, :, in_slot, :] = merged

        num_sent = scratch.num_sent[0]
        scratch.num_sent[0] = num_sent + 1
        buffer = remainder(num_sent, 2)
        block = items.block(row.segment, divide(start, items.block_size))
        copy = self._tile_copy(block, remainder(start, items.block_size), buffer)
        # The buffer was last used two tiles ago.
        pl.when(num_sent >= 2)(copy.wait)
        scratch.written[buffer] = merged
        copy.start()

    def _tile_copy(self, block: int | jax.Array, start: int | jax.Array, buffer: jax.Array) -> Any:
        """The copy of a tile of tokens to its block; all have one size."""
        tile = self.scratch.written.shape[2]
        return pltpu.make_async_copy(
            self.scratch.written.at[buffer],
            self.items.in_cache(block, pl.ds(multiple_of(start, tile), tile)),
            self.scratch.sent.at[buffer],
        )

"""A step of the TPU kernel for decodes: each segment is one token.

The last item of a segment contains the place of its own token. The kernel inserts the key and value
on chip, where the segment reads them, and then copies the tile of tokens around them back to the
cache. A row writes only pages of its own, so decodes never wait for each other: the tile is copied
from its own buffer, and the kernel waits for it two segments later.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig
from jaxllm_kernels.ragged_paged_attention.tpu_items import Items, Pages
from jaxllm_kernels.ragged_paged_attention.tpu_primitives import (
    LOG2_E,
    UNSEEN,
    Ref,
    batch_dot,
    cast,
    cdiv,
    for_each,
    keep_first_rows,
    multiple_of,
)
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import LANES, KernelSizes, sublane_tile


class DecodeScratch(NamedTuple):
    """On-chip memory with the lifetime of the call."""

    written: Ref  # [2, K, sublane tile, W]: tiles that are copied back
    largest: Ref  # [K, G, LANES]: running softmax; all lanes are equal
    total: Ref  # [K, G, LANES]
    weighted: Ref  # [K, G, D]
    num_sent: Ref  # int32 [1]: decodes that have sent their token
    sent: Ref  # semaphores [2]

    @classmethod
    def shapes(
        cls, sizes: KernelSizes, slots: jax.ShapeDtypeStruct, group_size: int, lanes: int
    ) -> "DecodeScratch":
        _, heads, _, width = slots.shape
        return cls(
            written=pltpu.VMEM((2, heads, sublane_tile(slots.dtype), width), slots.dtype),
            largest=pltpu.VMEM((heads, group_size, LANES), jnp.float32),
            total=pltpu.VMEM((heads, group_size, LANES), jnp.float32),
            weighted=pltpu.VMEM((heads, group_size, lanes), jnp.float32),
            num_sent=pltpu.SMEM((1,), jnp.int32),
            sent=pltpu.SemaphoreType.DMA((2,)),
        )


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """A step of the grid, during tracing."""

    items: Items
    # The step's part of the operand; likewise `new` and `out`.
    q: Ref  # [tokens, K, G, D]
    new: Ref  # [tokens, K, W]
    kv_scales: Ref | None  # [K, 1, 2]
    sinks: Ref | None  # [K, G, 1]
    out: Ref
    scratch: DecodeScratch
    config: AttentionConfig
    sizes: KernelSizes

    def start(self) -> None:
        """Prepare for the first step."""
        self.scratch.num_sent[0] = 0

    def finish(self) -> None:
        """Wait for what is left after the last step."""
        num_sent = self.scratch.num_sent[0]
        for i in (1, 2):
            copy = self._token_copy(0, 0, lax.rem(num_sent + i, 2))
            pl.when(num_sent >= i)(copy.wait)

    def attend(self, segment: jax.Array) -> None:
        """Compute a segment."""
        items = self.items
        self._start_softmax()
        num_items = items.num_items(segment)

        def attend_item(item: jax.Array) -> None:
            slot = items.take_slot()
            items.fetch_next()
            pages = items.pages(segment, item)
            items.wait(segment, pages, slot)
            pl.when(item == num_items - 1)(lambda: self._insert_token(segment, pages, slot))
            self._attend_pages(segment, pages, slot)

        for_each(0, num_items, attend_item)
        self._store_output(segment)

    def _insert_token(self, segment: jax.Array, pages: Pages, slot: jax.Array) -> None:
        """Insert the segment's key and value into the slot of its last pages, and send them."""
        items, scratch, tile = self.items, self.scratch, self.scratch.written.shape[2]
        position = items.work.positions[segment]
        start = position - lax.rem(position, tile)
        in_slot = pl.ds(multiple_of(start - pages.first * items.block_size, tile), tile)
        old = items.slots[slot, :, in_slot, :].astype(jnp.float32)
        new = self.new[items.offset(segment)]  # [K, W]
        new = new.astype(jnp.float32)
        new = jnp.stack([new[head : head + 1] for head in range(items.num_heads)])
        is_new = lax.broadcasted_iota(jnp.int32, (1, tile, 1), 1) == position - start
        merged = cast(jnp.where(is_new, new, old), items.cache.dtype)
        items.slots[slot, :, in_slot, :] = merged

        num_sent = scratch.num_sent[0]
        scratch.num_sent[0] = num_sent + 1
        buffer = lax.rem(num_sent, 2)
        block = items.block(segment, lax.div(position, items.block_size))
        copy = self._token_copy(block, lax.rem(start, items.block_size), buffer)
        # The buffer was last used two segments ago.
        pl.when(num_sent >= 2)(copy.wait)
        scratch.written[buffer] = merged
        copy.start()

    def _token_copy(self, block: int | jax.Array, start: int | jax.Array, buffer: jax.Array) -> Any:
        """The copy of the tile of tokens around a new one to its block; all have one size."""
        tile = self.scratch.written.shape[2]
        return pltpu.make_async_copy(
            self.scratch.written.at[buffer],
            self.items.in_cache(block, pl.ds(multiple_of(start, tile), tile)),
            self.scratch.sent.at[buffer],
        )

    def _start_softmax(self) -> None:
        scratch = self.scratch
        if self.sinks is None:
            scratch.largest[...] = jnp.full_like(scratch.largest, UNSEEN)
            scratch.total[...] = jnp.zeros_like(scratch.total)
        else:
            scratch.largest[...] = jnp.broadcast_to(self.sinks[...] * LOG2_E, scratch.largest.shape)
            scratch.total[...] = jnp.ones_like(scratch.total)
        scratch.weighted[...] = jnp.zeros_like(scratch.weighted)

    def _attend_pages(self, segment: jax.Array, pages: Pages, slot: jax.Array) -> None:
        """Fold the pages of a slot into the softmax of a segment's queries.

        A chunk of keys that are not all seen is computed in halves. So a short context does not
        cost a whole chunk.
        """
        items, position = self.items, self.items.work.positions[segment]
        chunk_pages = self.sizes.chunk_pages
        half_pages = chunk_pages // 2 if chunk_pages % 2 == 0 else chunk_pages

        def attend_keys(page: jax.Array, num_pages: int, *, masked: bool) -> None:
            """Fold the keys of a slot's pages from that one on."""
            in_slot = multiple_of(page * items.block_size, num_pages * items.block_size)
            # The token's distance from the first key. It sees itself and what is before.
            distance = position - pages.first * items.block_size - in_slot
            keys = pl.ds(in_slot, num_pages * items.block_size)
            attend_heads = functools.partial(
                self._attend_heads, segment, slot, keys, distance, masked
            )
            for_each(0, items.num_heads // self.sizes.batch_heads, attend_heads)

        def attend_chunk(chunk: jax.Array) -> None:
            page = chunk * chunk_pages
            distance = position - (pages.first + page) * items.block_size
            is_whole = distance >= items.chunk_tokens - 1
            if self.config.sliding_window is not None:
                is_whole &= distance < self.config.sliding_window
            pl.when(is_whole)(lambda: attend_keys(page, chunk_pages, masked=False))

            @pl.when(~is_whole)
            def _():
                num_pages = jnp.minimum(pages.end - pages.first - page, chunk_pages)

                def attend_half(half: jax.Array) -> None:
                    attend_keys(page + half * half_pages, half_pages, masked=True)

                for_each(0, cdiv(num_pages, half_pages), attend_half)

        for_each(0, cdiv(pages.end - pages.first, chunk_pages), attend_chunk)

    def _attend_heads(
        self,
        segment: jax.Array,
        slot: jax.Array,
        tokens: Any,
        distance: jax.Array,
        masked: bool,
        batch: jax.Array,
    ) -> None:
        """Fold keys of a slot into the softmax of a batch of heads."""
        scratch, dtype = self.scratch, self.q.dtype
        heads = pl.ds(batch * self.sizes.batch_heads, self.sizes.batch_heads)
        q = self.q[self.items.offset(segment), heads]  # [heads, G, D]
        lanes = q.shape[-1]
        kv = self.items.slots[slot, heads, tokens, :]  # [heads, keys, W]
        keys, values = kv[..., :lanes].astype(dtype), kv[..., -lanes:]
        if masked:
            # Values past the context are garbage. A weight of zero would not remove NaN.
            values = keep_first_rows(values, distance + 1)

        scores = batch_dot(q, keys, contract=(2, 2))
        # As much of the factor as possible is one constant.
        scores *= (
            self.config.scale if self.config.soft_cap is not None else self.config.scale * LOG2_E
        )
        if self.kv_scales is not None:
            scores *= self.kv_scales[heads, :, 0:1]
        if self.config.soft_cap is not None:
            scores = (self.config.soft_cap * LOG2_E) * jnp.tanh(scores / self.config.soft_cap)
        if masked:
            # This also replaces scores of garbage keys.
            distances = distance - lax.broadcasted_iota(jnp.int32, (1, 1, scores.shape[-1]), 2)
            is_seen = distances >= 0
            if self.config.sliding_window is not None:
                is_seen &= distances < self.config.sliding_window
            scores = jnp.where(is_seen, scores, UNSEEN)

        largest = scratch.largest[heads]  # [heads, G, LANES]
        new_largest = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        weights = jnp.exp2(scores - new_largest[..., :1])
        decay = jnp.exp2(largest - new_largest)
        scratch.largest[heads] = new_largest
        scratch.total[heads] = scratch.total[heads] * decay + weights.sum(axis=-1, keepdims=True)
        scratch.weighted[heads] = scratch.weighted[heads] * decay[..., :1] + batch_dot(
            weights.astype(dtype), values.astype(dtype), contract=(2, 1)
        )

    def _store_output(self, segment: jax.Array) -> None:
        """Store the result of the softmax."""
        out = self.scratch.weighted[...] / self.scratch.total[...][..., :1]
        if self.kv_scales is not None:
            out *= self.kv_scales[:, :, 1:2]
        self.out[self.items.offset(segment)] = out.astype(self.out.dtype)

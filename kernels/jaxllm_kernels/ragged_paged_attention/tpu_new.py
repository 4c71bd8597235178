"""How a step of a TPU kernel for prefill chunks writes the keys and values of its tokens."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.ragged_paged_attention.tpu_items import Items, Pages
from jaxllm_kernels.ragged_paged_attention.tpu_layout import sublane_tile
from jaxllm_kernels.ragged_paged_attention.tpu_primitives import (
    Ref,
    cast,
    divide,
    dot,
    for_each,
    for_each_in_batches,
    multiple_of,
)
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import KernelSizes


@dataclass(frozen=True, kw_only=True)
class NewTokens:
    """The tokens of a step's tile, during tracing."""

    items: Items
    new: Ref  # [K, tokens, W]: their keys and values
    sent: Ref  # a semaphore
    sizes: KernelSizes
    dtype: jnp.dtype  # of products

    def insert(self, segment: jax.Array, pages: Pages, slot: jax.Array) -> None:
        """Insert the keys and values of a tile whose places are in a slot, and send the pages."""
        items, tile = self.items, self.sizes.step_tokens
        start, length = items.work.positions[segment], items.work.lengths[segment]
        offset = items.offset(segment)
        # The rows of the slot that may change: those of all tokens, from a multiple on where the
        # slot can be cut.
        align, slot_tokens = sublane_tile(items.cache.dtype), items.slots.shape[2]
        num_rows = min(tile + align, slot_tokens)
        start_in_slot = start - pages.first * items.block_size
        first = jnp.clip(start_in_slot & -align, 0, slot_tokens - num_rows)
        rows = pl.ds(multiple_of(first, align), num_rows)

        def is_ours(axis: int) -> jax.Array:
            shape = (1, tile) if axis else (tile, 1)
            token = lax.broadcasted_iota(jnp.int32, shape, axis)
            return (offset <= token) & (token < offset + length)

        # A matrix product moves each token to its place.
        row = first - start_in_slot + lax.broadcasted_iota(jnp.int32, (num_rows, 1), 0)
        token = lax.broadcasted_iota(jnp.int32, (num_rows, tile), 1)
        moves = ((token - offset == row) & is_ours(1)).astype(self.dtype)
        is_new = (row >= 0) & (row < length)

        def insert_head(head: jax.Array) -> None:
            # A factor of zero would not remove NaN in other rows' tokens.
            new = jnp.where(is_ours(0), self.new[head].astype(jnp.float32), 0)
            moved = dot(moves, new.astype(self.dtype), contract=(1, 0))
            old = items.slots[slot, head, rows, :].astype(jnp.float32)
            items.slots[slot, head, rows, :] = cast(
                jnp.where(is_new, moved, old), items.cache.dtype
            )

        written = self._written(segment, pages)

        @pl.when(written.first < written.end)
        def _():
            batch = math.gcd(items.num_heads, self.sizes.batch_heads)
            for_each_in_batches(items.num_heads, batch, insert_head)

        self.for_each_write(segment, pages, slot, lambda copy: copy.start())

    def for_each_write(
        self, segment: jax.Array, pages: Pages, slot: jax.Array, action: Callable[[Any], None]
    ) -> None:
        """Call action with each copy of an item's new pages back to the cache."""
        items = self.items

        def act(page: jax.Array) -> None:
            action(
                pltpu.make_async_copy(
                    items.in_slot(slot, page - pages.first),
                    items.in_cache(items.block(segment, page)),
                    self.sent,
                )
            )

        written = self._written(segment, pages)
        for_each(written.first, written.end, act)

    def _written(self, segment: jax.Array, pages: Pages) -> Pages:
        """Those of an item's pages that have places of a segment's tokens; there may be none."""
        items = self.items
        start = items.work.positions[segment]
        first, end = jnp.maximum(pages.first, divide(start, items.block_size)), pages.end
        if items.work.ends is not None:
            last = divide(start + items.work.lengths[segment] - 1, items.block_size)
            end = jnp.minimum(end, last + 1)
        return Pages(first, end)

"""The sequence in which a TPU kernel fetches pages.

A segment attends to its row's pages item by item; an item is as many pages as a slot of on-chip
memory holds. The items of all segments form one sequence. While the kernel computes an item it
fetches the pages of later items, across the borders of segments and steps.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.ragged_paged_attention.tpu_primitives import (
    Ref,
    cdiv,
    divide,
    for_each_unrolled,
    multiple_of,
    remainder,
)
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import KernelSizes
from jaxllm_kernels.ragged_paged_attention.tpu_work import Work

# Copies that are started together: each looks up a block and computes two addresses.
_PAGES_AT_ONCE = 8

# The state between items: the next item to fetch, its slot, and the next slot to compute.
_FETCH_SEGMENT, _FETCH_ITEM, _FETCH_SLOT, _COMPUTE_SLOT = range(NUM_STATES := 4)


class Pages(NamedTuple):
    """Blocks [first, end) of a row's block table."""

    first: jax.Array
    end: jax.Array


@dataclass(frozen=True, kw_only=True)
class Items:
    """The items of a sequence of steps, during tracing."""

    work: Work
    cache: Ref
    slots: Ref  # [slots, K, tokens of a slot, W]
    state: Ref  # int32 [NUM_STATES]
    fetched: Ref  # semaphores [slots]
    sizes: KernelSizes
    sliding_window: int | None
    max_blocks: int

    def start(self, step: jax.Array) -> None:
        """Begin with a step's first item: fetch into all slots but one."""
        for i in range(NUM_STATES):
            self.state[i] = 0
        self.state[_FETCH_SEGMENT] = self.work.first_segments[step]
        for _ in range(self.sizes.num_slots - 1):
            self.fetch_next()

    def fetch_next(self) -> None:
        """Start to fetch the next item, if there is one."""
        state = self.state
        segment, item, slot = (state[i] for i in (_FETCH_SEGMENT, _FETCH_ITEM, _FETCH_SLOT))

        @pl.when(segment < self.work.first_segments[self.work.first_segments.shape[0] - 1])
        def _():
            all_pages = self._all_pages(segment)
            pages = self._pages_of(all_pages, item)
            # The next numbers are stored first, so that the scalar core need not read them again.
            is_last = pages.end == all_pages.end
            state[_FETCH_SEGMENT] = jnp.where(is_last, self._next_segment(segment), segment)
            state[_FETCH_ITEM] = jnp.where(is_last, 0, item + 1)
            state[_FETCH_SLOT] = self._after(slot)
            self._start_copies(segment, pages, slot)

    def take_slot(self) -> jax.Array:
        """Return the slot of the next item to compute, and advance."""
        slot = self.next_slot()
        self.state[_COMPUTE_SLOT] = self._after(slot)
        return slot

    def wait(self, pages: Pages, slot: jax.Array) -> None:
        """Wait until an item's pages are in its slot: for powers of two of them at once."""
        num_pages = pages.end - pages.first
        for bit in range(self.sizes.slot_pages.bit_length()):
            some = self.in_slot(slot, 0, 1 << bit)
            copy = pltpu.make_async_copy(some, some, self.fetched.at[slot])
            pl.when((num_pages & (1 << bit)) != 0)(copy.wait)

    def next_slot(self) -> jax.Array:
        """The slot that `take_slot` returns next; the others follow in turn."""
        return self.state[_COMPUTE_SLOT]

    def first_key(self, segment: jax.Array) -> jax.Array:
        """The position of the first key that is fetched for a segment."""
        return self._all_pages(segment).first * self.block_size

    def end(self, segment: jax.Array, position: jax.Array) -> jax.Array:
        """The position after the last key of a segment, whose first token has this position."""
        if self.work.ends is not None:
            return self.work.ends[segment]
        return position + self.work.lengths[segment]

    def num_pages(self, segment: jax.Array) -> jax.Array:
        pages = self._all_pages(segment)
        return pages.end - pages.first

    def num_items(self, segment: jax.Array) -> jax.Array:
        return cdiv(self.num_pages(segment), self.sizes.slot_pages)

    def pages(self, segment: jax.Array, item: jax.Array) -> Pages:
        """The pages of an item."""
        return self._pages_of(self._all_pages(segment), item)

    def _pages_of(self, pages: Pages, item: jax.Array) -> Pages:
        first = pages.first + item * self.sizes.slot_pages
        return Pages(first, jnp.minimum(first + self.sizes.slot_pages, pages.end))

    def offset(self, segment: jax.Array) -> jax.Array:
        """The index of a segment's first token in its step."""
        return remainder(self.work.tokens[segment], self.sizes.step_tokens)

    @property
    def num_heads(self) -> int:
        """The number of kv heads of this group."""
        return self.slots.shape[1]

    @property
    def block_size(self) -> int:
        return self.cache.shape[2]

    @property
    def chunk_tokens(self) -> int:
        return self.sizes.chunk_pages * self.block_size

    def block(self, segment: jax.Array, page: jax.Array) -> jax.Array:
        return self.work.block_tables[self.work.rows[segment] * self.max_blocks + page]

    def in_cache(self, block: int | jax.Array, tokens: Any = slice(None)) -> Ref:
        """This group's heads of a block."""
        return self.cache.at[block, pl.ds(self.first_head(), self.num_heads), tokens]

    def first_head(self) -> jax.Array:
        """The first kv head of this group."""
        return lax.div(pl.program_id(0), self.sizes.row_groups) * self.num_heads

    def in_slot(self, slot: jax.Array, index: int | jax.Array, num_pages: int = 1) -> Ref:
        """The memory of consecutive pages in a slot."""
        start = multiple_of(index * self.block_size, self.block_size)
        return self.slots.at[slot, :, pl.ds(start, num_pages * self.block_size)]

    def _all_pages(self, segment: jax.Array) -> Pages:
        """The pages that a segment sees, without those before its first token's window."""
        position = self.work.positions[segment]
        first = jnp.zeros_like(position)
        if self.sliding_window is not None:
            oldest = jnp.maximum(position - (self.sliding_window - 1), 0)
            first = divide(oldest, self.block_size)
        last = divide(self.end(segment, position) - 1, self.block_size)
        return Pages(first, last + 1)

    def _start_copies(self, segment: jax.Array, pages: Pages, slot: jax.Array) -> None:
        """Start to copy pages to a slot."""
        table = self.work.rows[segment] * self.max_blocks + pages.first

        def start(first: jax.Array, num: int) -> None:
            # First all blocks: the compiler reads no memory across the start of a copy.
            blocks = [self.work.block_tables[table + first + i] for i in range(num)]
            target = self.in_slot(slot, first, num)
            for i, block in enumerate(blocks):
                tokens = pl.ds(i * self.block_size, self.block_size)
                pltpu.make_async_copy(
                    self.in_cache(block), target.at[:, tokens], self.fetched.at[slot]
                ).start()

        for_each_unrolled(pages.end - pages.first, _PAGES_AT_ONCE, start)

    def _next_segment(self, segment: jax.Array) -> jax.Array:
        """The next segment in this group of rows."""
        segment += 1
        if self.sizes.row_groups == 1:
            return segment
        # The other groups have the next steps.
        first_segments = self.work.first_segments
        step = divide(self.work.tokens[segment - 1], self.sizes.step_tokens)
        next_step = jnp.minimum(step + self.sizes.row_groups, first_segments.shape[0] - 1)
        is_last = segment == first_segments[step + 1]
        return jnp.where(is_last, first_segments[next_step], segment)

    def _after(self, slot: jax.Array) -> jax.Array:
        return jnp.where(slot + 1 == self.sizes.num_slots, 0, slot + 1)

"""How blocks of keys and values come from the paged cache into a GPU's shared memory.

Both attention kernels have a producer warpgroup that does nothing else. It fills a ring of stages,
each a block of keys and a block of values, of consecutive tokens of one row and kv head; the compute
warpgroups wait for a stage, use it and give it back. Whatever the cache holds, they find 16-bit
values in the ring, and no value past the end of the context, since a weight of zero would not
silence garbage that is NaN.

A 16-bit cache is copied straight into the ring, one TMA copy per page. An 8-bit cache is copied to a
ring of its own and converted by the producer: the tensor core wants both operands of 16 bits, and
the compute warpgroups have no time to spare for it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

KEYS, VALUES = 0, 1


class Lane(NamedTuple):
    """The stages of the keys, or of the values."""

    blocks: Any  # [num_stages, block_tokens, H]
    full: Any  # barriers: a stage may be read
    free: Any  # barriers: a stage has been read
    # Where values with a ragged end, or blocks of 8 bits, land first.
    staged: Any  # [num_staged, block_tokens, H] of an 8-bit type; None for a 16-bit cache
    landed: Any  # barriers of what does not land in its stage at once


class Span(NamedTuple):
    """Consecutive keys of a row and a kv head, all blocks of which but the last are whole."""

    row: jax.Array
    head: jax.Array
    start: jax.Array
    end: jax.Array


@dataclass(frozen=True, kw_only=True)
class BlockRing:
    """The static facts of a ring."""

    block_tokens: int
    page_tokens: int
    head_size: int
    num_stages: int
    dtype: DTypeLike  # in the ring
    cache_dtype: DTypeLike
    num_staged: int  # blocks of an 8-bit cache in flight
    num_readers: int  # compute warpgroups

    @property
    def load_tokens(self) -> int:
        """Tokens per copy: a page, or the part of it that is a block."""
        return min(self.page_tokens, self.block_tokens)

    @property
    def converts(self) -> bool:
        return jnp.dtype(self.cache_dtype).itemsize == 1

    def scratch(self) -> tuple[Lane, Lane]:
        """The shared memory that a kernel has to allocate: lanes of keys and of values."""
        return self._lane(), self._lane()

    def _lane(self) -> Lane:
        shape = (self.block_tokens, self.head_size)
        copies = self.block_tokens // self.load_tokens
        staged = None
        if self.converts:
            transforms = operand_transforms(self.head_size, self.cache_dtype)
            staged = plgpu.SMEM((self.num_staged, *shape), self.cache_dtype, transforms=transforms)
        return Lane(
            blocks=plgpu.SMEM(
                (self.num_stages, *shape),
                self.dtype,
                transforms=operand_transforms(self.head_size, self.dtype),
            ),
            full=plgpu.Barrier(
                num_arrivals=1 if self.converts else copies, num_barriers=self.num_stages
            ),
            free=plgpu.Barrier(num_arrivals=self.num_readers, num_barriers=self.num_stages),
            staged=staged,
            landed=plgpu.Barrier(
                num_arrivals=copies, num_barriers=self.num_staged if self.converts else 1
            ),
        )

    # The producer's side.

    def send(self, span: Span, cache, block_tables, lanes: tuple[Lane, Lane], sent):
        """Send the blocks of a span; sent counts the blocks before, the result those after it."""
        num_blocks = self.count_blocks(span)
        send_block = self._send_converted if self.converts else self._send_copied
        if self.converts:
            for i in range(self.num_staged):
                for which in (KEYS, VALUES):
                    pl.when(i < num_blocks)(
                        lambda i=i, which=which: self._stage(
                            span, jnp.int32(i), cache, block_tables, lanes, which, sent
                        )
                    )

        def body(i, sent):
            for which in (KEYS, VALUES):
                send_block(span, i, cache, block_tables, lanes, which, sent)
            return sent + 1

        return lax.fori_loop(jnp.int32(0), num_blocks, body, sent)

    def drain(self, lanes: tuple[Lane, Lane], sent):
        """Wait until all stages have been read."""
        for age in range(self.num_stages, 0, -1):

            @pl.when(sent >= age)
            def _():
                for lane in lanes:
                    plgpu.barrier_wait(lane.free.at[self._stage_of(sent - age)])

    # The readers' side.

    def count_blocks(self, span: Span):
        """The blocks that a span has."""
        return lax.div(span.end - span.start + (self.block_tokens - 1), jnp.int32(self.block_tokens))

    def wait(self, lane: Lane, number):
        """Wait for block `number`, counted since the kernel's start, and get its [tokens, H]."""
        stage = self._stage_of(number)
        plgpu.barrier_wait(lane.full.at[stage])
        return lane.blocks.at[stage]

    def release(self, lane: Lane, number):
        """Give a block's stage back."""
        plgpu.barrier_arrive(lane.free.at[self._stage_of(number)])

    # Details.

    def _stage_of(self, number):
        return lax.rem(number, jnp.int32(self.num_stages))

    def _wait_until_free(self, lane: Lane, number):
        @pl.when(number >= self.num_stages)
        def _():
            plgpu.barrier_wait(lane.free.at[self._stage_of(number)])

    def _send_copied(self, span: Span, i, cache, block_tables, lanes, which, sent):
        lane = lanes[which]
        stage = self._stage_of(sent)
        self._wait_until_free(lane, sent)
        block = lane.blocks.at[stage]
        num_tokens = span.end - span.start - i * self.block_tokens
        is_whole = num_tokens >= self.block_tokens

        if which == KEYS:
            self._copy(span, i, cache, block_tables, which, block, lane.full.at[stage])
            return

        @pl.when(is_whole)
        def _():
            self._copy(span, i, cache, block_tables, which, block, lane.full.at[stage])

        # The last values of a context land behind another barrier, lose what follows them, and are
        # announced to the readers as if every copy had just arrived.
        @pl.when(~is_whole)
        def _():
            self._copy(span, i, cache, block_tables, which, block, lane.landed.at[0])
            plgpu.barrier_wait(lane.landed.at[0])
            for part, row in self._parts(block):
                values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                part[...] = _zero_from(values, num_tokens - row)
            plgpu.commit_smem()
            for _ in range(self.block_tokens // self.load_tokens):
                plgpu.barrier_arrive(lane.full.at[stage])

    def _send_converted(self, span: Span, i, cache, block_tables, lanes, which, sent):
        lane = lanes[which]
        slot = lax.rem(sent, jnp.int32(self.num_staged))
        stage = self._stage_of(sent)
        plgpu.barrier_wait(lane.landed.at[slot])
        self._wait_until_free(lane, sent)
        num_tokens = span.end - span.start - i * self.block_tokens
        source = self._parts(lane.staged.at[slot])
        target = self._parts(lane.blocks.at[stage])
        for (narrow, row), (wide, _) in zip(source, target, strict=True):
            values = plgpu.load(narrow, layout=plgpu.Layout.WGMMA, optimized=False)
            values = _widen(values, self.dtype)
            if which == VALUES:
                values = _zero_from(values, num_tokens - row)
            wide[...] = values
        plgpu.commit_smem()
        plgpu.barrier_arrive(lane.full.at[stage])

        @pl.when(i + self.num_staged < self.count_blocks(span))
        def _():
            self._stage(span, i + self.num_staged, cache, block_tables, lanes, which, sent - i)

    def _stage(self, span: Span, i, cache, block_tables, lanes, which, sent_before):
        lane = lanes[which]
        slot = lax.rem(sent_before + i, jnp.int32(self.num_staged))
        self._copy(
            span, i, cache, block_tables, which, lane.staged.at[slot], lane.landed.at[slot]
        )

    def _copy(self, span: Span, i, cache, block_tables, which, block, barrier):
        """Start copying block i of a span; absent pages count as copied."""
        size = self.load_tokens
        for j in range(self.block_tokens // size):
            token = span.start + i * self.block_tokens + j * size

            @pl.when(token < span.end)
            def _(j=j, token=token):
                page = block_tables[span.row, lax.div(token, jnp.int32(self.page_tokens))]
                source = cache.at[page, which, span.head]
                if size < self.page_tokens:
                    offset = lax.rem(token, jnp.int32(self.page_tokens))
                    source = source.at[pl.ds(pl.multiple_of(offset, size), size)]
                plgpu.copy_gmem_to_smem(source, block.at[pl.ds(j * size, size)], barrier)

            @pl.when(token >= span.end)
            def _():
                plgpu.barrier_arrive(barrier)

    def _parts(self, block):
        """A block in parts that a producer's few registers can hold, and their first rows."""
        return [
            (block.at[pl.ds(row, 64), pl.ds(column, min(64, self.head_size - column))], row)
            for row in range(0, self.block_tokens, 64)
            for column in range(0, self.head_size, 64)
        ]


def operand_transforms(width: int, dtype: DTypeLike):
    """The layout in shared memory of a matrix product's operand with rows of a width.

    Tiles of eight rows, as wide as the widest swizzle that divides the rows.
    """
    columns = next(size for size in (64, 32, 16) if width % size == 0)
    swizzle = columns * jnp.dtype(dtype).itemsize
    tiling = plgpu.TilingTransform((8, columns))
    return (tiling,) if swizzle == 16 else (tiling, plgpu.SwizzleTransform(swizzle))


def _zero_from(x, row):
    """x [tokens, H] with zeros from a row on."""
    rows = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=plgpu.Layout.WGMMA)
    return jnp.where(rows < row, x, jnp.zeros_like(x))


def _widen(x, dtype: DTypeLike):
    # There is no instruction from 8-bit floats to bfloat16.
    if x.dtype == jnp.float8_e4m3fn and dtype == jnp.bfloat16:
        x = x.astype(jnp.float16)
    return x.astype(dtype)

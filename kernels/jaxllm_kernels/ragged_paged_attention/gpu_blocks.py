"""Loads blocks of keys and values from the paged cache into a GPU's shared memory.

Both attention kernels have a producer warpgroup that only loads. It fills a ring of stages with
blocks of consecutive tokens of a row and kv head, keys and values alternating. The compute
warpgroups wait for a stage, use it and release it. The ring always has 16-bit numbers, whatever the
cache's dtype, and zeros for values past the end of the context: a weight of zero would not remove
NaN garbage.

A 16-bit cache is copied directly to the ring, one TMA copy per page. An 8-bit cache is copied to a
second ring, and the producer converts it: the matrix instruction needs 16 bits in both operands,
and the compute warpgroups have no time for conversions.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxllm_kernels.compat import smem_transforms
from jaxllm_kernels.ragged_paged_attention.gpu_tuning import Tuning

KEYS, VALUES = 0, 1


class Span(NamedTuple):
    """Consecutive keys of a row and a kv head; all of its blocks except the last are full."""

    row: jax.Array
    head: jax.Array
    start: jax.Array
    end: jax.Array


class RingRefs(NamedTuple):
    """A ring's shared memory. Block j's keys use stage 2j, its values stage 2j + 1."""

    stages: Any  # [2 * num_stages, block_tokens, H]
    full: Any  # barriers: a stage may be read
    free: Any  # barriers: a stage has been read
    # Blocks that cannot be copied directly to their stage: 8-bit blocks, and the last values of a
    # context.
    staged: Any  # [2 * num_staged, block_tokens, H] of the cache's dtype; None for 16 bits
    landed: Any  # barriers


@dataclass(frozen=True, kw_only=True)
class BlockRing:
    """The static properties of a ring, and its operations."""

    block_tokens: int
    page_tokens: int
    head_size: int
    num_stages: int  # blocks in the ring
    num_staged: int  # blocks of an 8-bit cache before their conversion
    num_readers: int  # compute warpgroups
    dtype: DTypeLike  # in the ring
    cache_dtype: DTypeLike

    @property
    def load_tokens(self) -> int:
        """Tokens per copy: a page, or a block if that is smaller."""
        return min(self.page_tokens, self.block_tokens)

    @property
    def num_copies(self) -> int:
        """Copies per block."""
        return self.block_tokens // self.load_tokens

    @property
    def converts(self) -> bool:
        return jnp.dtype(self.cache_dtype).itemsize == 1

    @classmethod
    def of(cls, tuning: Tuning, *, cache: jax.Array, dtype: DTypeLike, num_readers: int):
        """Make the ring for a cache."""
        *_, page_tokens, head_size = cache.shape
        return cls(
            block_tokens=tuning.block_tokens,
            page_tokens=page_tokens,
            head_size=head_size,
            num_stages=tuning.num_stages,
            num_staged=tuning.num_staged,
            num_readers=num_readers,
            dtype=dtype,
            cache_dtype=cache.dtype,
        )

    def scratch(self) -> RingRefs:
        """The shared memory that a kernel must allocate."""

        def blocks(number: int, dtype: DTypeLike):
            shape = (2 * number, self.block_tokens, self.head_size)
            return plgpu.SMEM(shape, dtype, transforms=operand_transforms(self.head_size, dtype))

        return RingRefs(
            stages=blocks(self.num_stages, self.dtype),
            full=plgpu.Barrier(
                num_arrivals=1 if self.converts else self.num_copies,
                num_barriers=2 * self.num_stages,
            ),
            free=plgpu.Barrier(num_arrivals=self.num_readers, num_barriers=2 * self.num_stages),
            staged=blocks(self.num_staged, self.cache_dtype) if self.converts else None,
            # Never a single barrier: its address would be a constant, which the compiler keeps
            # until the kernel's end, in a register or spilled.
            landed=plgpu.Barrier(
                num_arrivals=self.num_copies,
                num_barriers=2 * self.num_staged if self.converts else 2,
            ),
        )

    def count_blocks(self, span: Span):
        """The number of a span's blocks."""
        return lax.div(
            span.end - span.start + (self.block_tokens - 1), jnp.int32(self.block_tokens)
        )

    # Operations of the readers.

    def wait(self, refs: RingRefs, which: int, block):
        """Wait for the keys or values of a block, counted from the kernel's start: [tokens, H]."""
        stage = self._stage(which, block)
        plgpu.barrier_wait(refs.full.at[stage])
        return refs.stages.at[stage]

    def release(self, refs: RingRefs, which: int, block):
        """Release the keys or values of a block."""
        plgpu.barrier_arrive(refs.free.at[self._stage(which, block)])

    # Operations of the producer.

    def send(self, span: Span, cache, block_tables, refs: RingRefs, sent):
        """Send the blocks of a span. `sent` counts the blocks before; return the count after."""
        num_blocks = self.count_blocks(span)

        def copy(which, i, target, barrier):
            self._copy(span, which, i, cache, block_tables, target, barrier)

        def count_tokens(i):
            return span.end - span.start - i * self.block_tokens

        def send_block(i, _):
            stage = self._wait_until_free(refs, KEYS, sent + i)
            copy(KEYS, i, refs.stages.at[stage], refs.full.at[stage])
            self._send_values(refs, sent + i, count_tokens(i), copy, i)

        # One code path converts keys and values, and one copies all blocks, including the first:
        # then the compiler keeps fewer addresses.
        lead = 2 * self.num_staged

        def stage_or_convert(n, _):
            @pl.when(n >= lead)
            def _():
                which, i = _split(n - lead)
                self._convert(refs, which, sent + i, count_tokens(i))

            @pl.when(n < 2 * num_blocks)
            def _():
                which, i = _split(n)
                slot = self._slot(which, sent + i)
                copy(which, i, refs.staged.at[slot], refs.landed.at[slot])

        if self.converts:
            lax.fori_loop(jnp.int32(0), 2 * num_blocks + lead, stage_or_convert, None)
        else:
            lax.fori_loop(jnp.int32(0), num_blocks, send_block, None)
        return sent + num_blocks

    def drain(self, refs: RingRefs, sent):
        """Wait until the readers have read everything."""
        for age in range(self.num_stages, 0, -1):
            for which in (KEYS, VALUES):

                @pl.when(sent >= age)
                def _(which=which, age=age):
                    plgpu.barrier_wait(refs.free.at[self._stage(which, sent - age)])

    def _stage(self, which, block):
        return lax.rem(2 * block + which, jnp.int32(2 * self.num_stages))

    def _slot(self, which, block):
        return lax.rem(2 * block + which, jnp.int32(2 * self.num_staged))

    def _wait_until_free(self, refs: RingRefs, which, block):
        stage = self._stage(which, block)

        @pl.when(block >= self.num_stages)
        def _():
            plgpu.barrier_wait(refs.free.at[stage])

        return stage

    def _send_values(self, refs: RingRefs, block, num_tokens, copy, i):
        stage = self._wait_until_free(refs, VALUES, block)
        values = refs.stages.at[stage]
        is_whole = num_tokens >= self.block_tokens

        @pl.when(is_whole)
        def _():
            copy(VALUES, i, values, refs.full.at[stage])

        # The last values of a context arrive at another barrier. After their end is zeroed, the
        # readers are signalled as if every copy had just arrived.
        @pl.when(~is_whole)
        def _():
            landed = refs.landed.at[lax.rem(block, jnp.int32(2))]
            copy(VALUES, i, values, landed)
            plgpu.barrier_wait(landed)
            self._zero_end(values, num_tokens)
            plgpu.commit_smem()
            for _j in range(self.num_copies):
                plgpu.barrier_arrive(refs.full.at[stage])

    def _convert(self, refs: RingRefs, which, block, num_tokens):
        slot = self._slot(which, block)
        plgpu.barrier_wait(refs.landed.at[slot])
        stage = self._wait_until_free(refs, which, block)
        target = refs.stages.at[stage]

        @self._for_each_part
        def _(part, row):
            narrow = refs.staged.at[slot].at[part]
            wide = plgpu.load(narrow, layout=plgpu.Layout.WGMMA, optimized=False)  # pyright: ignore[reportCallIssue]
            # There is no instruction that converts 8-bit floats to bfloat16.
            if wide.dtype == jnp.float8_e4m3fn:
                wide = wide.astype(jnp.float16)
            target[part] = wide.astype(self.dtype)

        @pl.when((which == VALUES) & (num_tokens < self.block_tokens))
        def _():
            self._zero_end(target, num_tokens)

        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.full.at[stage])

    def _zero_end(self, values, num_tokens):
        """Zero the rows after the first tokens of a block."""

        @self._for_each_part
        def _(part, row):
            kept = plgpu.load(values.at[part], layout=plgpu.Layout.WGMMA)  # pyright: ignore[reportCallIssue]
            values[part] = _zero_from(kept, num_tokens - row)

    def _copy(self, span: Span, which, i, cache, block_tables, target, barrier):
        """Start to copy block i of a span; absent pages count as copied."""
        size = self.load_tokens
        for j in range(self.num_copies):
            token = span.start + i * self.block_tokens + j * size

            @pl.when(token < span.end)
            def _(j=j, token=token):
                page = block_tables[span.row, lax.div(token, jnp.int32(self.page_tokens))]
                source = cache.at[page, which, span.head]
                if size < self.page_tokens:
                    offset = lax.rem(token, jnp.int32(self.page_tokens))
                    source = source.at[pl.ds(pl.multiple_of(offset, size), size)]
                plgpu.copy_gmem_to_smem(source, target.at[pl.ds(j * size, size)], barrier)

            @pl.when(token >= span.end)
            def _():
                plgpu.barrier_arrive(barrier)

    def _for_each_part(self, body):
        """Call body with the index and the first row of each part of a block.

        A part fits in few registers. This is a loop, because JAX's search for layouts slows down
        quickly with the number of references.
        """
        columns = operand_columns(self.head_size)
        num_across = self.head_size // columns

        def visit(i, _):
            row = pl.multiple_of(lax.div(i, jnp.int32(num_across)) * 64, 64)
            column = pl.multiple_of(lax.rem(i, jnp.int32(num_across)) * columns, columns)
            body((pl.ds(row, 64), pl.ds(column, columns)), row)

        num_parts = self.block_tokens // 64 * num_across
        lax.fori_loop(jnp.int32(0), jnp.int32(num_parts), visit, None)


def operand_transforms(width: int, dtype: DTypeLike):
    """The layout in shared memory of a matrix product's operand with rows of this width.

    Tiles have eight rows, and are as wide as the widest swizzle that divides the rows.
    """
    columns = operand_columns(width)
    swizzle = columns * jnp.dtype(dtype).itemsize
    return smem_transforms((8, columns), swizzle if swizzle > 16 else None)


def operand_columns(width: int) -> int:
    """The columns of a tile."""
    return next(columns for columns in (64, 32, 16) if width % columns == 0)


def _split(n):
    """Split an index of alternating keys and values into which of both, and the block."""
    return lax.rem(n, jnp.int32(2)), lax.div(n, jnp.int32(2))


def _zero_from(x, row):
    """x [tokens, columns] with zeros from a row on."""
    # One number per row: the compiler does not recognise that a row's elements are equal.
    layout = plgpu.Layout.WGMMA.reduce(1)
    rows = plgpu.broadcasted_iota(jnp.int32, x.shape[:1], 0, layout=layout)
    return jnp.where(lax.broadcast_in_dim(rows < row, x.shape, [0]), x, jnp.zeros_like(x))

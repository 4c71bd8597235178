"""Loads blocks of keys and values from the paged cache into a GPU's shared memory.

The attention kernels have a producer warpgroup that only loads. It fills a ring of stages with
blocks of consecutive tokens of a row and kv head, keys and values alternating. The compute
warpgroups wait for a stage, use it and release it. The ring always has 16-bit numbers, whatever the
cache's dtype. In latent attention one array is both keys and values, so a block is one stage.

A 16-bit cache is copied directly to the ring, one TMA copy per page. An 8-bit cache is copied to a
second ring, and the producer converts it: the matrix instruction needs 16 bits in both operands,
and the compute warpgroups have no time for conversions.

**What drains, and what does not.** The producer waits for one thing only: a free stage. It treats a
span's end like any other place, so the next span's blocks are in flight while the readers are still
at this span's last blocks. The producer of an 8-bit cache converts a block when the second ring
needs its place again. This lag, too, continues from one span to the next. Only at the kernel's end
the producer converts what is left, and waits until everything has been read.

**The end of a context.** The last block of a span has garbage after its end, possibly NaN, and a
weight of zero would not remove NaN. The first reader of such values replaces them by zeros in the
stage (`zero_end`). The producer could do this only after the copy has landed. It would wait for
that at every span's end, with nothing in flight meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

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
    head: jax.Array | None  # None: the cache has no heads
    start: jax.Array
    end: jax.Array


class RingRefs(NamedTuple):
    """A ring's shared memory. Block j's keys use stage 2j, its values stage 2j + 1; if both are one
    array, it uses stage j."""

    stages: Any  # [2 * num_stages, block_tokens, H]
    full: Any  # barriers: a stage may be read
    free: Any  # barriers: a stage has been read
    # 8-bit blocks before their conversion; None for 16 bits.
    staged: Any  # [2 * num_staged, block_tokens, H] of the cache's dtype
    landed: Any  # barriers: an 8-bit block has arrived


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
    num_kinds: int = 2  # keys and values; 1 if one array is both

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
            shape = (self.num_kinds * number, self.block_tokens, self.head_size)
            return plgpu.SMEM(shape, dtype, transforms=operand_transforms(self.head_size, dtype))

        return RingRefs(
            stages=blocks(self.num_stages, self.dtype),
            full=plgpu.Barrier(
                num_arrivals=1 if self.converts else self.num_copies,
                num_barriers=self.num_kinds * self.num_stages,
            ),
            free=plgpu.Barrier(
                num_arrivals=self.num_readers, num_barriers=self.num_kinds * self.num_stages
            ),
            staged=blocks(self.num_staged, self.cache_dtype) if self.converts else None,
            landed=plgpu.Barrier(num_arrivals=self.num_copies, num_barriers=2 * self.num_staged)
            if self.converts
            else None,
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

    def zero_end(self, refs: RingRefs, block, num_tokens, columns: range | None = None) -> None:
        """Zero a block's values after its first tokens, in some columns or in all, for all readers.

        One reader calls this, after it has waited for the values. It must signal the other readers
        before they read. A whole block is left as it is.
        """
        values = refs.stages.at[self._stage(self.num_kinds - 1, block)]

        @pl.when(num_tokens < self.block_tokens)
        def _():
            def zero(part, row):
                kept = plgpu.load(values.at[part], layout=plgpu.Layout.WGMMA)  # pyright: ignore[reportCallIssue]
                values[part] = _zero_from(kept, num_tokens - row)

            self._for_each_part(zero, first_row=num_tokens, columns=columns)
            plgpu.commit_smem()

    # Operations of the producer.

    def send_all(
        self, num_spans, begin_span: Callable[[Any], Span], source: "Source", refs: RingRefs
    ) -> None:
        """Send the blocks of all spans, and wait until the readers have read everything.

        `begin_span` reads a span. It is called once for each, in order, before the span's first
        block is sent. If the cache has 8 bits, the last `num_staged` blocks before that are not
        converted yet, so `begin_span` must not wait for their readers.
        """

        def send_span(i, sent):
            span = begin_span(i)
            num_blocks = self.count_blocks(span)

            def send_block(j, _):
                self._send_block(span, j, sent + j, source, refs)

            lax.fori_loop(jnp.int32(0), num_blocks, send_block, None)
            return sent + num_blocks

        sent = lax.fori_loop(jnp.int32(0), num_spans, send_span, jnp.int32(0))
        if self.converts:

            def convert(n, _):
                which, age = _split(n)
                self._convert(refs, which, sent + age - self.num_staged)

            lax.fori_loop(jnp.int32(0), jnp.int32(2 * self.num_staged), convert, None)
        for age in range(self.num_stages, 0, -1):
            for which in range(self.num_kinds):

                @pl.when(sent >= age)
                def _(which=which, age=age):
                    plgpu.barrier_wait(refs.free.at[self._stage(which, sent - age)])

    def _stage(self, which, block):
        return lax.rem(self.num_kinds * block + which, jnp.int32(self.num_kinds * self.num_stages))

    def _slot(self, which, block):
        return lax.rem(2 * block + which, jnp.int32(2 * self.num_staged))

    def _wait_until_free(self, refs: RingRefs, which, block):
        stage = self._stage(which, block)

        @pl.when(block >= self.num_stages)
        def _():
            plgpu.barrier_wait(refs.free.at[stage])

        return stage

    def _send_block(self, span: Span, i, block, source: "Source", refs: RingRefs) -> None:
        """Send block i of a span, which is this block of the kernel."""
        # Look up the places before waiting for a free one in the ring, which hides the latency.
        places = source.look_up(self, span, i)

        def copy(which, target, barrier):
            source.copy(self, span, which, i, places, target, barrier)

        if not self.converts:
            for which in range(self.num_kinds):
                stage = self._wait_until_free(refs, which, block)
                copy(which, refs.stages.at[stage], refs.full.at[stage])
            return

        # One code path for keys and values: then the compiler keeps fewer addresses.
        def convert_and_copy(which, _):
            self._convert(refs, which, block - self.num_staged)
            slot = self._slot(which, block)
            copy(which, refs.staged.at[slot], refs.landed.at[slot])

        lax.fori_loop(jnp.int32(KEYS), jnp.int32(VALUES + 1), convert_and_copy, None)

    def _convert(self, refs: RingRefs, which, block) -> None:
        """Convert the keys or values of a block into the ring, if there is such a block."""

        @pl.when(block >= 0)
        def _():
            slot = self._slot(which, block)
            plgpu.barrier_wait(refs.landed.at[slot])
            stage = self._wait_until_free(refs, which, block)
            target = refs.stages.at[stage]

            def convert(part, row):
                narrow = refs.staged.at[slot].at[part]
                wide = plgpu.load(narrow, layout=plgpu.Layout.WGMMA, optimized=False)  # pyright: ignore[reportCallIssue]
                # There is no instruction that converts 8-bit floats to bfloat16.
                if wide.dtype == jnp.float8_e4m3fn:
                    wide = wide.astype(jnp.float16)
                target[part] = wide.astype(self.dtype)

            self._for_each_part(convert)
            plgpu.commit_smem()
            plgpu.barrier_arrive(refs.full.at[stage])

    def _for_each_part(self, body, first_row=0, columns: range | None = None) -> None:
        """Call body with the index and the first row of each part of a block, from a row on.

        A part fits in few registers. This is a loop, because JAX's search for layouts slows down
        quickly with the number of references.
        """
        columns = columns or range(self.head_size)
        width = operand_columns(self.head_size)
        num_across = len(columns) // width

        def visit(i, _):
            row = pl.multiple_of(lax.div(i, jnp.int32(num_across)) * 64, 64)
            column = lax.rem(i, jnp.int32(num_across)) * width + columns.start
            body((pl.ds(row, 64), pl.ds(pl.multiple_of(column, width), width)), row)

        # A division would take a register more, which head size 256 does not have.
        first_part = lax.shift_right_logical(jnp.int32(first_row), jnp.int32(6)) * num_across
        num_parts = self.block_tokens // 64 * num_across
        lax.fori_loop(first_part, jnp.int32(num_parts), visit, None)


class Source(Protocol):
    """Where a producer finds keys and values, in the kernel's arguments."""

    def look_up(self, ring: BlockRing, span: Span, i) -> Any:
        """Read where block i of a span is."""
        ...

    def copy(self, ring: BlockRing, span: Span, which, i, places: Any, target, barrier) -> None:
        """Start to copy the keys or values of block i, given what `look_up` returned."""
        ...


class Pages(NamedTuple):
    """A paged cache: the `Source` of decoders."""

    cache: Any
    block_tables: Any

    def look_up(self, ring: BlockRing, span: Span, i) -> list[Any]:
        """The page of each copy of block i; after the span's end its last page again."""
        first = span.start + i * ring.block_tokens
        tokens = (first + j * ring.load_tokens for j in range(ring.num_copies))
        return [
            self.block_tables[
                span.row, lax.div(jnp.minimum(token, span.end - 1), jnp.int32(ring.page_tokens))
            ]
            for token in tokens
        ]

    def copy(self, ring: BlockRing, span: Span, which, i, places: list[Any], target, barrier):
        """Start to copy block i of a span; pages after its end count as copied."""
        size = ring.load_tokens
        for j, page in enumerate(places):
            token = span.start + i * ring.block_tokens + j * size

            @pl.when(token < span.end)
            def _(j=j, token=token, page=page):
                source = self.cache.at[page if span.head is None else (page, which, span.head)]
                if size < ring.page_tokens:
                    offset = lax.rem(token, jnp.int32(ring.page_tokens))
                    source = source.at[pl.ds(pl.multiple_of(offset, size), size)]
                plgpu.copy_gmem_to_smem(source, target.at[pl.ds(j * size, size)], barrier)

            @pl.when(token >= span.end)
            def _():
                plgpu.barrier_arrive(barrier)


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

"""The Pallas kernel of the TPU backend: attention over pages that it fetches and updates itself.

The grid walks over steps of query tokens. A segment is the tokens of a step that belong to one row:
a decode, or the part of a prefill chunk in the step's tile. A segment attends to its row's pages
item by item; an item is as many pages as a slot of on-chip memory holds. The items of all segments
form one sequence. While the kernel computes an item it fetches the pages of later items, across the
borders of segments and steps.

The last items of a segment also contain the places of its own tokens. The kernel inserts their keys
and values on chip, where the segment reads them, and then copies them back to the cache. Rules for
writes and reads:
  - A row writes only pages of its own, so decodes never wait for each other. The tile of tokens
    around a new one is copied from its own buffer, and the kernel waits for it two segments later.
  - Tiles of one chunk read what earlier tiles have written. So all writes of a tile are complete
    before any later page is fetched.

Axis letters besides those of api.py: G query heads per kv head, M query lines of a segment
(G x tokens), D lanes of a query, W lanes of a token's key and value in the cache.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import LANES, KernelSizes
from jaxllm_kernels.ragged_paged_attention.tpu_work import Work

# The score of a key that is not seen. It is finite, because a chunk may have only such keys for a
# query: their weights are one. As soon as the query sees a key, exp(_UNSEEN - score) = 0 multiplies
# them.
_UNSEEN = float(jnp.finfo(jnp.float32).min)

# A reference to memory. (Type checkers know only a part of `jax.Ref`.)
Ref = Any

# The kernel's state between items: the next item to fetch, its slot, the next slot to compute, and
# the number of decodes that have sent their token.
_FETCH_SEGMENT, _FETCH_ITEM, _FETCH_SLOT, _COMPUTE_SLOT, _NUM_SENT = range(NUM_STATES := 5)


class Scratch(NamedTuple):
    """On-chip memory with the lifetime of the call."""

    pages: Ref  # [slots, K, tokens of a slot, W]
    written: Ref  # [2, K, sublane tile, W]: tiles that decodes copy back
    largest: Ref  # [K, M, LANES]: running softmax; all lanes are equal
    total: Ref  # [K, M, LANES]
    weighted: Ref  # [K, M, D]
    state: Ref  # int32 [NUM_STATES]
    fetched: Ref  # semaphores [slots]
    sent: Ref  # semaphores [2]


def compute_step(*refs: Ref, has_scales: bool, has_sinks: bool, **static: Any) -> None:
    """Name the references, and compute the step."""
    unnamed = iter(refs)
    work = Work(*itertools.islice(unnamed, len(Work._fields)))
    q, new = next(unnamed), next(unnamed)
    kv_scales = next(unnamed) if has_scales else None
    sinks = next(unnamed) if has_sinks else None
    next(unnamed)  # the cache as an operand; it is the same memory as the result
    out, cache = next(unnamed), next(unnamed)
    _Step(
        work=work,
        q=q,
        new=new,
        kv_scales=kv_scales,
        sinks=sinks,
        out=out,
        cache=cache,
        scratch=Scratch(*unnamed),
        **static,
    ).run()


class _Pages(NamedTuple):
    """Blocks [first, end) of a row's block table."""

    first: jax.Array
    end: jax.Array


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step of the grid, during tracing."""

    work: Work
    # The step's part of the operand; likewise `new` and `out`.
    q: Ref
    new: Ref
    kv_scales: Ref | None
    sinks: Ref | None
    out: Ref
    cache: Ref
    scratch: Scratch
    config: AttentionConfig
    sizes: KernelSizes
    max_blocks: int

    def run(self) -> None:
        row_groups, step_tokens = self.sizes.row_groups, self.sizes.step_tokens
        row_group = lax.rem(pl.program_id(0), row_groups)
        step = pl.program_id(1) * row_groups + row_group

        @pl.when(pl.program_id(1) == 0)
        def _():
            for i in range(NUM_STATES):
                self.scratch.state[i] = 0
            self.scratch.state[_FETCH_SEGMENT] = row_group * step_tokens
            for _ in range(self.sizes.num_slots - 1):
                self._fetch_next()

        self.out[...] = jnp.zeros_like(self.out)
        first, end = self.work.first_segments[step], self.work.first_segments[step + 1]
        _for_each(first, end, self._attend)

        if self.sizes.for_decodes:

            @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
            def _():
                num_sent = self.scratch.state[_NUM_SENT]
                for i in (1, 2):
                    copy = self._token_copy(0, 0, lax.rem(num_sent + i, 2))
                    pl.when(num_sent >= i)(copy.wait)

    def _attend(self, segment: jax.Array) -> None:
        """Compute a segment."""
        self._start_softmax()
        num_items = self._num_items(segment)

        def attend_item(item: jax.Array) -> None:
            slot = self._take_slot()
            if self.sizes.for_decodes:
                self._fetch_next()
            pages = self._pages(segment, item)
            self._for_each_copy(segment, pages, slot, lambda copy: copy.wait())
            if self.sizes.for_decodes:
                pl.when(item == num_items - 1)(lambda: self._insert_token(segment, pages, slot))
            else:
                self._insert_tokens(segment, pages, slot)
                self._fetch_next()
            self._attend_pages(segment, pages, slot)

        _for_each(0, num_items, attend_item)
        self._store_output(segment)

    # Indices and places.

    @property
    def _heads(self) -> int:
        """The number of kv heads of this group."""
        return self.scratch.pages.shape[1]

    def _all_heads(self) -> Any:
        """This group's kv heads in the cache."""
        group = lax.div(pl.program_id(0), self.sizes.row_groups)
        return pl.ds(group * self._heads, self._heads)

    @property
    def _block_size(self) -> int:
        return self.cache.shape[2]

    def _all_pages(self, segment: jax.Array) -> _Pages:
        """The pages that a segment sees, without those before its first token's window."""
        position = self.work.positions[segment]
        first = jnp.zeros_like(position)
        if self.config.sliding_window is not None:
            oldest = jnp.maximum(position - (self.config.sliding_window - 1), 0)
            first = lax.div(oldest, self._block_size)
        last = lax.div(position + self.work.lengths[segment] - 1, self._block_size)
        return _Pages(first, last + 1)

    def _num_items(self, segment: jax.Array) -> jax.Array:
        pages = self._all_pages(segment)
        return _cdiv(pages.end - pages.first, self.sizes.slot_pages)

    def _pages(self, segment: jax.Array, item: jax.Array) -> _Pages:
        """The pages of an item."""
        pages = self._all_pages(segment)
        first = pages.first + item * self.sizes.slot_pages
        return _Pages(first, jnp.minimum(first + self.sizes.slot_pages, pages.end))

    def _offset(self, segment: jax.Array) -> jax.Array:
        """The index of a segment's first token in its step."""
        return lax.rem(self.work.tokens[segment], self.sizes.step_tokens)

    def _block(self, segment: jax.Array, page: jax.Array) -> jax.Array:
        return self.work.block_tables[self.work.rows[segment] * self.max_blocks + page]

    # Fetching.

    def _for_each_copy(
        self,
        segment: jax.Array,
        pages: _Pages,
        slot: jax.Array,
        action: Callable[[Any], None],
    ) -> None:
        """Call action with each copy of pages to a slot."""

        def act(page: jax.Array) -> None:
            action(
                pltpu.make_async_copy(
                    self._in_cache(self._block(segment, page)),
                    self._in_slot(slot, page - pages.first),
                    self.scratch.fetched.at[slot],
                )
            )

        _for_each(pages.first, pages.end, act)

    def _in_cache(self, block: jax.Array) -> Ref:
        """This group's heads of a block."""
        return self.cache.at[block, self._all_heads()]

    def _in_slot(self, slot: jax.Array, index: jax.Array) -> Ref:
        """The memory of one page in a slot."""
        start = _multiple_of(index * self._block_size, self._block_size)
        return self.scratch.pages.at[slot, :, pl.ds(start, self._block_size)]

    def _fetch_next(self) -> None:
        """Start to fetch the next item, if there is one."""
        state = self.scratch.state
        segment, item, slot = (state[i] for i in (_FETCH_SEGMENT, _FETCH_ITEM, _FETCH_SLOT))

        @pl.when(segment < self.work.first_segments[self.work.first_segments.shape[0] - 1])
        def _():
            pages = self._pages(segment, item)
            self._for_each_copy(segment, pages, slot, lambda copy: copy.start())
            is_last = item + 1 == self._num_items(segment)
            state[_FETCH_SEGMENT] = jnp.where(is_last, self._next_segment(segment), segment)
            state[_FETCH_ITEM] = jnp.where(is_last, 0, item + 1)
            state[_FETCH_SLOT] = self._next_slot(slot)

    def _next_segment(self, segment: jax.Array) -> jax.Array:
        """The next segment in this group of rows."""
        segment += 1
        if self.sizes.row_groups == 1:
            return segment
        # Decodes: a step has as many segments as tokens, and other groups have the next steps.
        others = (self.sizes.row_groups - 1) * self.sizes.step_tokens
        is_first = lax.rem(segment, self.sizes.step_tokens) == 0
        return jnp.where(is_first, segment + others, segment)

    def _take_slot(self) -> jax.Array:
        """Return the slot of the next item to compute, and advance."""
        slot = self.scratch.state[_COMPUTE_SLOT]
        self.scratch.state[_COMPUTE_SLOT] = self._next_slot(slot)
        return slot

    def _next_slot(self, slot: jax.Array) -> jax.Array:
        return jnp.where(slot + 1 == self.sizes.num_slots, 0, slot + 1)

    # Writing.

    def _insert_token(self, segment: jax.Array, pages: _Pages, slot: jax.Array) -> None:
        """Insert a decode's key and value into the slot of its last pages, and send them."""
        scratch, tile = self.scratch, self.scratch.written.shape[2]
        position = self.work.positions[segment]
        start = position - lax.rem(position, tile)
        in_slot = pl.ds(_multiple_of(start - pages.first * self._block_size, tile), tile)
        old = scratch.pages[slot, :, in_slot, :].astype(jnp.float32)
        new = self.new[self._offset(segment)]  # [K, W]
        new = new.astype(jnp.float32)
        new = jnp.stack([new[head : head + 1] for head in range(self._heads)])
        is_new = lax.broadcasted_iota(jnp.int32, (1, tile, 1), 1) == position - start
        merged = _cast(jnp.where(is_new, new, old), self.cache.dtype)
        scratch.pages[slot, :, in_slot, :] = merged

        num_sent = scratch.state[_NUM_SENT]
        scratch.state[_NUM_SENT] = num_sent + 1
        buffer = lax.rem(num_sent, 2)
        block = self._block(segment, lax.div(position, self._block_size))
        copy = self._token_copy(block, lax.rem(start, self._block_size), buffer)
        # The buffer was last used two segments ago.
        pl.when(num_sent >= 2)(copy.wait)
        scratch.written[buffer] = merged
        copy.start()

    def _token_copy(self, block: int | jax.Array, start: int | jax.Array, buffer: jax.Array) -> Any:
        """The copy of the tile of tokens around a new one to its block; all have one size."""
        tile = self.scratch.written.shape[2]
        return pltpu.make_async_copy(
            self.scratch.written.at[buffer],
            self.cache.at[block, self._all_heads(), pl.ds(_multiple_of(start, tile), tile)],
            self.scratch.sent.at[buffer],
        )

    def _insert_tokens(self, segment: jax.Array, pages: _Pages, slot: jax.Array) -> None:
        """Insert the keys and values of a tile whose places are in a slot, and send the pages."""
        block_size, tile = self._block_size, self.sizes.step_tokens
        start, length = self.work.positions[segment], self.work.lengths[segment]
        precision = _precision(self.q.dtype)
        # Token i of the tile has the position i + shift.
        offset = self._offset(segment)
        shift = start - offset

        def is_ours(axis: int) -> jax.Array:
            shape = (1, tile) if axis else (tile, 1)
            token = lax.broadcasted_iota(jnp.int32, shape, axis)
            return (offset <= token) & (token < offset + length)

        def insert_page(page: jax.Array) -> None:
            position = page * block_size + lax.broadcasted_iota(jnp.int32, (block_size, 1), 0)
            token = lax.broadcasted_iota(jnp.int32, (block_size, tile), 1)
            # A matrix product moves each token to its place.
            moves = ((token + shift == position) & is_ours(1)).astype(self.q.dtype)
            is_new = (start <= position) & (position < start + length)
            first = _multiple_of((page - pages.first) * block_size, block_size)
            in_slot = pl.ds(first, block_size)

            def insert_head(head: jax.Array) -> None:
                # A factor of zero would not remove NaN in other rows' tokens.
                new = jnp.where(is_ours(0), self.new[head].astype(jnp.float32), 0)
                moved = jnp.dot(
                    moves,
                    new.astype(self.q.dtype),
                    preferred_element_type=jnp.float32,
                    precision=precision,
                )
                old = self.scratch.pages[slot, head, in_slot, :].astype(jnp.float32)
                self.scratch.pages[slot, head, in_slot, :] = _cast(
                    jnp.where(is_new, moved, old), self.cache.dtype
                )

            _for_each(0, self._heads, insert_head)

        def copy(page: jax.Array) -> Any:
            return pltpu.make_async_copy(
                self._in_slot(slot, page - pages.first),
                self._in_cache(self._block(segment, page)),
                self.scratch.sent.at[0],
            )

        def insert_and_send(page: jax.Array) -> None:
            insert_page(page)
            copy(page).start()

        first = jnp.maximum(pages.first, lax.div(start, block_size))
        _for_each(first, pages.end, insert_and_send)
        _for_each(first, pages.end, lambda page: copy(page).wait())

    # Computing.

    def _start_softmax(self) -> None:
        scratch = self.scratch
        if self.sinks is None:
            scratch.largest[...] = jnp.full_like(scratch.largest, _UNSEEN)
            scratch.total[...] = jnp.zeros_like(scratch.total)
        else:
            sinks = self.sinks[...]  # [K, G, 1]
            if not self.sizes.for_decodes:
                shape = (*sinks.shape[:2], self.sizes.step_tokens, LANES)
                sinks = jnp.broadcast_to(sinks[..., None], shape)
            scratch.largest[...] = jnp.broadcast_to(
                sinks.reshape(*scratch.largest.shape[:2], -1), scratch.largest.shape
            )
            scratch.total[...] = jnp.ones_like(scratch.total)
        scratch.weighted[...] = jnp.zeros_like(scratch.weighted)

    def _attend_pages(self, segment: jax.Array, pages: _Pages, slot: jax.Array) -> None:
        """Fold the pages of a slot into the softmax of a segment's queries."""
        chunk_tokens = self.sizes.chunk_pages * self._block_size
        start, length = self.work.positions[segment], self.work.lengths[segment]

        def attend_chunk(chunk: jax.Array) -> None:
            in_slot = _multiple_of(chunk * chunk_tokens, chunk_tokens)
            first = pages.first * self._block_size + in_slot
            num_keys = start + length - first  # past this chunk's end, except in the last one
            is_seen = self._is_seen(segment, first)
            for_heads = functools.partial(
                self._attend_heads, segment, slot, in_slot, num_keys, is_seen
            )
            _for_each(0, self._heads // self.sizes.batch_heads, for_heads)

        _for_each(0, _cdiv(pages.end - pages.first, self.sizes.chunk_pages), attend_chunk)

    def _is_seen(self, segment: jax.Array, first: jax.Array) -> jax.Array:
        """Whether the queries see the keys of a chunk that begins at `first`: [M or 1, keys]."""
        keys = self.sizes.chunk_pages * self._block_size
        if self.sizes.for_decodes:
            key = lax.broadcasted_iota(jnp.int32, (1, keys), 1)
            distance = self.work.positions[segment] - first - key
        else:
            tile = self.sizes.step_tokens
            shape = (self.scratch.largest.shape[1], keys)
            line = lax.broadcasted_iota(jnp.int32, shape, 0)
            token = line & (tile - 1)  # tiles are powers of two
            shift = self.work.positions[segment] - self._offset(segment) - first
            distance = token + shift - lax.broadcasted_iota(jnp.int32, shape, 1)
        is_seen = distance >= 0
        if self.config.sliding_window is not None:
            is_seen &= distance < self.config.sliding_window
        return is_seen

    def _attend_heads(
        self,
        segment: jax.Array,
        slot: jax.Array,
        in_slot: jax.Array,
        num_keys: jax.Array,
        is_seen: jax.Array,
        batch: jax.Array,
    ) -> None:
        """Fold a chunk of a slot into the softmax of a batch of heads."""
        scratch, dtype = self.scratch, self.q.dtype
        heads = pl.ds(batch * self.sizes.batch_heads, self.sizes.batch_heads)
        tokens = pl.ds(in_slot, self.sizes.chunk_pages * self._block_size)
        q = self._load_q(segment, heads)  # [heads, M, D]
        lanes = q.shape[-1]
        kv = scratch.pages[slot, heads, tokens, :]  # [heads, keys, W]
        keys = kv[..., :lanes].astype(dtype)
        # Values past the context are garbage. A weight of zero would not remove NaN.
        values = _keep_first_rows(kv[..., -lanes:], num_keys).astype(dtype)

        scores = _batch_dot(q, keys, contract=(2, 2)) * self.config.scale
        if self.kv_scales is not None:
            scores *= self.kv_scales[heads, :, 0:1]
        if self.config.soft_cap is not None:
            scores = self.config.soft_cap * jnp.tanh(scores / self.config.soft_cap)
        # This also replaces scores of garbage keys.
        scores = jnp.where(is_seen[None], scores, _UNSEEN)

        largest = scratch.largest[heads]  # [heads, M, LANES]
        new_largest = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        weights = jnp.exp(scores - new_largest[..., :1])
        decay = jnp.exp(largest - new_largest)
        scratch.largest[heads] = new_largest
        scratch.total[heads] = scratch.total[heads] * decay + weights.sum(axis=-1, keepdims=True)
        scratch.weighted[heads] = scratch.weighted[heads] * decay[..., :1] + _batch_dot(
            weights.astype(dtype), values, contract=(2, 1)
        )

    def _load_q(self, segment: jax.Array, heads: Any) -> jax.Array:
        """The queries of a segment: [heads, M, D]."""
        if self.sizes.for_decodes:
            return self.q[self._offset(segment), heads]
        q = self.q[heads]
        return q.reshape(q.shape[0], -1, q.shape[-1])

    def _store_output(self, segment: jax.Array) -> None:
        """Store the result of the softmax."""
        scratch = self.scratch

        def output(heads: Any) -> jax.Array:
            out = scratch.weighted[heads] / scratch.total[heads][..., :1]
            return out if self.kv_scales is None else out * self.kv_scales[heads, :, 1:2]

        offset = self._offset(segment)
        if self.sizes.for_decodes:
            self.out[offset] = output(pl.ds(0, self._heads)).astype(self.out.dtype)
            return

        def store_head(head: jax.Array) -> None:
            old = self.out[pl.ds(head, 1)].astype(jnp.float32)
            line = lax.broadcasted_iota(jnp.int32, old.shape, 2)
            is_ours = (offset <= line) & (line < offset + self.work.lengths[segment])
            new = output(pl.ds(head, 1)).reshape(old.shape)
            self.out[pl.ds(head, 1)] = jnp.where(is_ours, new, old).astype(self.out.dtype)

        _for_each(0, self._heads, store_head)


def _for_each(start: int | jax.Array, end: int | jax.Array, body: Callable) -> None:
    """Call body with every index."""
    if isinstance(end, int) and end == 1:
        body(0)
    else:
        lax.fori_loop(start, end, lambda i, _: body(i), None)


def _multiple_of(x: int | jax.Array, n: int) -> Any:
    """Tell the compiler that n divides x."""
    return x if isinstance(x, int) else pl.multiple_of(x, n)


def _cdiv(a: jax.Array, b: int) -> jax.Array:
    """Divide a non-negative number and round up."""
    return lax.div(a + (b - 1), b)


def _precision(dtype: jnp.dtype) -> lax.Precision:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def _batch_dot(a: jax.Array, b: jax.Array, *, contract: tuple[int, int]) -> jax.Array:
    """Matrix products in float32 over the first axis."""
    i, j = contract
    return lax.dot_general(
        a,
        b,
        dimension_numbers=(((i,), (j,)), ((0,), (0,))),
        precision=_precision(a.dtype),
        preferred_element_type=jnp.float32,
    )


def _cast(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Convert a float32 array whose values are exact in the dtype."""
    if jnp.issubdtype(dtype, jnp.integer):
        x = x.astype(jnp.int32)
    return x.astype(dtype)


def _keep_first_rows(x: jax.Array, num_rows: jax.Array) -> jax.Array:
    """x [batch, rows, lanes] with zeros from row `num_rows` on.

    Rows share 32-bit words with their neighbours, and not every chip compares or selects in small
    dtypes. So this masks words.
    """
    rows_per_word = 4 // x.dtype.itemsize
    batch, rows, lanes = x.shape
    words = pltpu.bitcast(x.reshape(batch * rows, lanes), jnp.int32)
    words = words.reshape(batch, rows // rows_per_word, lanes)
    word = lax.broadcasted_iota(jnp.int32, (1, words.shape[1], 1), 1)
    kept = jnp.clip(num_rows - word * rows_per_word, 0, rows_per_word)
    mask = jnp.where(kept == rows_per_word, -1, (1 << (kept * (8 * x.dtype.itemsize))) - 1)
    words = (words & mask).reshape(-1, lanes)
    return pltpu.bitcast(words, x.dtype).reshape(x.shape)

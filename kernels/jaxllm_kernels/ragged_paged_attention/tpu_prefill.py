"""A step of the TPU kernel for prefill chunks: a tile of tokens, with a segment for each row in it.

The last items of a segment contain the places of its own tokens. The kernel inserts their keys and
values on chip, where the segment reads them, and copies the pages back to the cache
(`tpu_new.py`). Tiles of one chunk read what earlier tiles have written, so all writes of a tile are
complete before any later page is fetched. The kernel computes meanwhile.

Where tokens see later ones (`RaggedBatch.last_seen`), a segment also has the pages up to the last
key that any of its tokens sees. What later segments write there is in the cache before the kernel
starts (`tpu_ahead.py`); they write the same again.

Attention is computed in units: a chunk of keys for a batch of heads. (A kv head with many query
heads counts as several heads, each with a part of them.) Scores are transposed, with keys along
sublanes and queries along lanes:
  - Maxima and sums over keys combine registers. They do not combine a register's lanes.
  - The matrix unit can hold the weights and stream the values through them. Weights fill it, if it
    is 256 x 256; values of head size 128 would fill half of it.
Scores, weights and products with values depend on each other, and each takes long to begin. So a
step of the loop computes the scores of a unit beside the weights of the one before. Both use the
same memory: a head's scores are read before they are replaced.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig
from jaxllm_kernels.ragged_paged_attention.tpu_items import Items
from jaxllm_kernels.ragged_paged_attention.tpu_layout import SUBLANES
from jaxllm_kernels.ragged_paged_attention.tpu_new import NewTokens
from jaxllm_kernels.ragged_paged_attention.tpu_primitives import (
    LOG2_E,
    UNSEEN,
    Ref,
    cdiv,
    divide,
    dot,
    for_each,
    for_each_in_batches,
    keep_first_rows,
    multiple_of,
    registers,
    remainder,
)
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import KernelSizes


class PrefillScratch(NamedTuple):
    """On-chip memory with the lifetime of the call."""

    scores: Ref  # [heads of a batch, keys of a chunk, M]: of one unit
    unit_largest: (
        Ref  # [heads of a batch, SUBLANES, M]: its largest scores, of which the largest counts
    )
    largest: Ref  # [heads, SUBLANES, M]: running softmax; all sublanes are equal
    total: Ref  # [heads, SUBLANES, M]: the sum of all sublanes counts
    weighted: Ref  # [heads, V, M]
    sent: Ref  # a semaphore

    @classmethod
    def shapes(
        cls,
        sizes: KernelSizes,
        slots: jax.ShapeDtypeStruct,
        group_size: int,
        dtype: jnp.dtype,
    ) -> "PrefillScratch":
        _, heads, slot_tokens, _ = slots.shape
        heads *= sizes.group_parts
        lines = sizes.lines(group_size)
        chunk_tokens = slot_tokens * sizes.chunk_pages // sizes.slot_pages
        return cls(
            scores=pltpu.VMEM((sizes.batch_heads, chunk_tokens, lines), jnp.float32),
            unit_largest=pltpu.VMEM((sizes.batch_heads, SUBLANES, lines), jnp.float32),
            largest=pltpu.VMEM((heads, SUBLANES, lines), jnp.float32),
            total=pltpu.VMEM((heads, SUBLANES, lines), jnp.float32),
            weighted=pltpu.VMEM((heads, sizes.layout.value_lanes, lines), jnp.float32),
            sent=pltpu.SemaphoreType.DMA(()),
        )


class _Unit(NamedTuple):
    """A chunk of a segment's keys for a batch of heads."""

    item: jax.Array
    batch: jax.Array
    # The chunk's slot, and of its first key the index in the slot and the position.
    slot: jax.Array
    in_slot: jax.Array
    first: jax.Array
    # Whether all tokens of the segment see all keys.
    is_whole: jax.Array


# Units of an item that are computed while the pages before it are written, if it has so many.
_UNITS_BEFORE_FETCH = 2


@dataclass(frozen=True, kw_only=True)
class PrefillStep:
    """A step of the grid, during tracing."""

    items: Items
    # The step's part of the operand; likewise `new` and `out`.
    q: Ref  # [heads, query heads of each, tokens, D]
    new: Ref  # [K, tokens, W]
    kv_scales: Ref | None  # [K, 1, 2]
    sinks: Ref | None  # [heads, 1, M]
    ahead: Ref | None  # int32 [1, 1, M]: how far ahead each query sees
    out: Ref  # [heads, query heads of each, tokens, V]
    scratch: PrefillScratch
    config: AttentionConfig
    sizes: KernelSizes

    def start(self) -> None:
        """Prepare for the first step."""

    def finish(self) -> None:
        """Wait for what is left after the last step."""

    def attend(self, step: jax.Array, first: jax.Array, end: jax.Array) -> None:
        """Compute the segments of a step. Outputs of no segment are zero."""
        # A segment may be the whole step. (Its index is past the end if there is none.)
        lengths = self.items.work.lengths
        length = lengths[jnp.minimum(first, lengths.shape[0] - 1)]

        @pl.when((first == end) | (length < self.sizes.step_tokens))
        def _():
            self.out[...] = jnp.zeros_like(self.out)

        for_each(first, end, self._attend_segment)

    def _attend_segment(self, segment: jax.Array) -> None:
        items, heads, chunk_tokens = self.items, self.sizes.batch_heads, self.items.chunk_tokens
        new_tokens = NewTokens(
            items=items, new=self.new, sent=self.scratch.sent, sizes=self.sizes, dtype=self.q.dtype
        )
        units_of_chunk = self.q.shape[0] // heads
        chunks_of_item = self.sizes.slot_pages // self.sizes.chunk_pages
        units_of_item = chunks_of_item * units_of_chunk
        num_units = cdiv(items.num_pages(segment), self.sizes.chunk_pages) * units_of_chunk
        first_slot, first_key = items.next_slot(), items.first_key(segment)
        whole_first, whole_end = self._whole_chunks(segment, first_key)
        delay = min(_UNITS_BEFORE_FETCH, units_of_item - 1)

        def unit_at(index: jax.Array) -> _Unit:
            chunk = divide(index, units_of_chunk)
            item = divide(chunk, chunks_of_item)
            in_slot = (chunk - item * chunks_of_item) * chunk_tokens
            return _Unit(
                item=item,
                batch=index - chunk * units_of_chunk,
                slot=remainder(first_slot + item, self.sizes.num_slots),
                in_slot=multiple_of(in_slot, chunk_tokens),
                first=first_key + chunk * chunk_tokens,
                is_whole=(whole_first <= chunk) & (chunk < whole_end),
            )

        def open_item(item: jax.Array) -> None:
            pages, slot = items.pages(segment, item), items.take_slot()
            items.wait(pages, slot)
            new_tokens.insert(segment, pages, slot)

        def fetch_after_writes(unit: _Unit) -> None:
            pages = items.pages(segment, unit.item)
            new_tokens.for_each_write(segment, pages, unit.slot, lambda copy: copy.wait())
            items.fetch_next()

        def attend_unit(index: jax.Array) -> None:
            """Compute the scores of a unit beside the weights of the one before, if there are."""
            unit = unit_at(jnp.minimum(index, num_units - 1))
            before = unit_at(jnp.maximum(index - 1, 0))
            is_first, is_end = index == 0, index == num_units
            # The units of its item that are computed before that one.
            num_before = index - 1 - before.item * units_of_item
            fetches = ~is_first & (num_before == delay) | is_end & (num_before < delay)
            opens = (index == unit.item * units_of_item) & ~is_end

            @pl.when(fetches | opens)
            def _():
                pl.when(fetches)(lambda: fetch_after_writes(before))
                pl.when(opens)(lambda: open_item(unit.item))

            def score_and_fold(*, masked: bool) -> None:
                for i in range(heads):
                    # The scores are issued first: their products take longest.
                    scores, largest = self.scratch.scores[i], self.scratch.unit_largest[i]
                    self._score(segment, unit, i, masked=masked)
                    self._fold(segment, before, scores, largest, i, masked=masked)

            is_whole = unit.is_whole & before.is_whole
            pl.when(is_whole & ~is_first)(lambda: score_and_fold(masked=False))

            @pl.when(~is_whole | is_first)
            def _():
                pl.when(~is_first)(lambda: score_and_fold(masked=True))

                @pl.when(is_first)
                def _():
                    for i in range(heads):
                        self._score(segment, unit, i, masked=True)

        self._start_softmax()
        # There is one more step than units. What it scores is not used, and takes no time.
        for_each(0, num_units + 1, attend_unit)
        self._store_output(segment)

    def _start_softmax(self) -> None:
        scratch = self.scratch
        if self.sinks is None:
            scratch.largest[...] = jnp.full_like(scratch.largest, UNSEEN)
            scratch.total[...] = jnp.zeros_like(scratch.total)
        else:
            sinks = self.sinks[...] * LOG2_E
            scratch.largest[...] = jnp.broadcast_to(sinks, scratch.largest.shape)
            scratch.total[...] = jnp.full_like(scratch.total, 1 / SUBLANES)
        scratch.weighted[...] = jnp.zeros_like(scratch.weighted)

    def _whole_chunks(
        self, segment: jax.Array, first_key: jax.Array
    ) -> tuple[int | jax.Array, jax.Array]:
        """The chunks [first, end) of a segment whose keys are seen by all of its tokens."""
        chunk_tokens, start = self.items.chunk_tokens, self.items.work.positions[segment]
        first, end = 0, divide(start + 1 - first_key, chunk_tokens)
        if self.config.sliding_window is not None:
            last = start + self.items.work.lengths[segment] - 1
            outside = jnp.maximum(last + 1 - self.config.sliding_window - first_key, 0)
            first = cdiv(outside, chunk_tokens)
        return first, end

    def _score(self, segment: jax.Array, unit: _Unit, i: int, *, masked: bool) -> None:
        """Compute the scores of a unit's i-th head."""
        config, lanes = self.config, self.q.shape[-1]
        head = unit.batch * self.sizes.batch_heads + i
        q = self.q[head].reshape(-1, lanes)  # [M, D]
        tokens = pl.ds(unit.in_slot, self.items.chunk_tokens)
        kv_head = self._kv_head(head)
        keys = self.items.slots[unit.slot, kv_head, tokens, :lanes].astype(q.dtype)
        scores = dot(keys, q, contract=(1, 1))  # [keys, M]
        # As much of the factor as possible is one constant.
        scores *= config.scale if config.soft_cap is not None else config.scale * LOG2_E
        if self.kv_scales is not None:
            scores *= self.kv_scales[kv_head, :, 0:1]
        if config.soft_cap is not None:
            scores = (config.soft_cap * LOG2_E) * jnp.tanh(scores / config.soft_cap)
        if masked:
            # This also replaces scores of garbage keys.
            scores = jnp.where(self._is_seen(segment, unit), scores, UNSEEN)
        self.scratch.scores[i] = scores
        self.scratch.unit_largest[i] = registers(scores).max(axis=0)

    def _is_seen(self, segment: jax.Array, unit: _Unit) -> jax.Array:
        """Whether the queries see the keys of a unit: [keys, M]."""
        keys, lines = self.scratch.scores.shape[1:]
        items, tile = self.items, self.sizes.step_tokens
        # From the keys of a chunk's first register to the query. For the other registers it differs
        # by a constant.
        line = lax.broadcasted_iota(jnp.int32, (1, SUBLANES, lines), 2)
        key = lax.broadcasted_iota(jnp.int32, (1, SUBLANES, lines), 1)
        token = line & (tile - 1)  # tiles are powers of two
        shift = items.work.positions[segment] - items.offset(segment) - unit.first
        distance = token + shift - key
        shape = (keys // SUBLANES, SUBLANES, lines)
        start = lax.broadcasted_iota(jnp.int32, shape, 0) * SUBLANES
        reach = distance if self.ahead is None else distance + self.ahead[...]
        is_seen = reach >= start
        if self.config.sliding_window is not None:
            is_seen &= distance - self.config.sliding_window < start
        return is_seen.reshape(keys, lines)

    def _fold(
        self,
        segment: jax.Array,
        unit: _Unit,
        scores: jax.Array,
        unit_largest: jax.Array,
        i: int,
        *,
        masked: bool,
    ) -> None:
        """Fold a unit's i-th head, given its scores, into the softmax."""
        items, scratch = self.items, self.scratch
        head = unit.batch * self.sizes.batch_heads + i
        tokens = pl.ds(unit.in_slot, items.chunk_tokens)
        values = items.slots[unit.slot, self._kv_head(head), tokens, self.sizes.layout.values]
        if masked:
            # Values past the context are garbage. A weight of zero would not remove NaN.
            end = items.end(segment, items.work.positions[segment])
            values = keep_first_rows(values[None], end - unit.first)[0]

        largest = scratch.largest[head]
        new_largest = jnp.maximum(largest, unit_largest.max(axis=0, keepdims=True))
        weights = jnp.exp2(scores - new_largest[:1])
        decay = jnp.exp2(largest - new_largest)
        scratch.largest[head] = new_largest
        scratch.total[head] = scratch.total[head] * decay + registers(weights).sum(axis=0)
        scratch.weighted[head] = scratch.weighted[head] * decay[:1] + dot(
            values.astype(self.q.dtype), weights.astype(self.q.dtype), contract=(0, 0)
        )

    def _store_output(self, segment: jax.Array) -> None:
        """Store the result of the softmax."""
        scratch, offset = self.scratch, self.items.offset(segment)
        length = self.items.work.lengths[segment]

        def store_head(head: jax.Array) -> None:
            factor = 1 / scratch.total[head].sum(axis=0, keepdims=True)
            if self.kv_scales is not None:
                factor *= self.kv_scales[self._kv_head(head), :, 1:2]
            new = (scratch.weighted[head] * factor).T.reshape(self.out.shape[1:])
            token = lax.broadcasted_iota(jnp.int32, new.shape, 1)
            is_ours = (offset <= token) & (token < offset + length)
            old = self.out[head].astype(jnp.float32)
            self.out[head] = jnp.where(is_ours, new, old).astype(self.out.dtype)

        for_each_in_batches(self.out.shape[0], self.sizes.batch_heads, store_head)

    def _kv_head(self, head: int | jax.Array) -> int | jax.Array:
        parts = self.sizes.group_parts
        return head if parts == 1 else divide(head, parts)

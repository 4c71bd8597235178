"""Attention of a decode or a short row: the online softmax of its queries over its pages.

The queries of a kv head, of all tokens and heads of the group, are lines of one matrix: line
token * G + head. The matrix unit holds keys and values, each once for all lines.
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
    cdiv,
    for_each,
    keep_first_rows,
    multiple_of,
)
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import LANES, KernelSizes


class RowScratch(NamedTuple):
    """On-chip memory of a row's M lines, of which a decode uses the first ones."""

    largest: Ref  # [K, M, LANES]: running softmax; all lanes are equal
    total: Ref  # [K, M, LANES]
    weighted: Ref  # [K, M, D]
    queries: Ref | None  # float32 [K, M, D]: of a short row

    @classmethod
    def shapes(cls, heads: int, lines: int, lanes: int, *, has_short: bool) -> "RowScratch":
        return cls(
            largest=pltpu.VMEM((heads, lines, LANES), jnp.float32),
            total=pltpu.VMEM((heads, lines, LANES), jnp.float32),
            weighted=pltpu.VMEM((heads, lines, lanes), jnp.float32),
            queries=pltpu.VMEM((heads, lines, lanes), jnp.float32) if has_short else None,
        )


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a step, during tracing."""

    items: Items
    segment: jax.Array
    # The most tokens that the code computes. If the row has fewer, lines of the others have
    # arbitrary results, which `store_output` puts where later rows or nobody's outputs are.
    num_tokens: int
    # The indices of the first token in q and in out.
    first_token: jax.Array
    first_output: jax.Array
    q: Ref  # [tokens, K, G, D]
    kv_scales: Ref | None  # [K, 1, 2]
    sinks: Ref | None  # [K, G, 1]
    out: Ref  # [tokens, K, G, D]
    scratch: RowScratch
    config: AttentionConfig
    sizes: KernelSizes

    @property
    def position(self) -> jax.Array:
        """The position of the first token."""
        return self.items.work.positions[self.segment]

    @property
    def length(self) -> int | jax.Array:
        return 1 if self.num_tokens == 1 else self.items.work.lengths[self.segment]

    @property
    def end(self) -> jax.Array:
        """The position after the last token."""
        return self.position + self.length

    def token(self, i: int) -> jax.Array:
        """The index of the i-th token in the operands, or of another token if there is none."""
        if i == 0:
            return self.first_token
        return jnp.minimum(self.first_token + i, self.q.shape[0] - 1)

    def place(self, i: int) -> jax.Array:
        """The position of the i-th token, negative if there is none."""
        if i == 0:
            return self.position
        return jnp.where(i < self.length, self.position + i, -1)

    @property
    def group_size(self) -> int:
        return self.q.shape[2]

    @property
    def lines(self) -> int:
        return self.num_tokens * self.group_size

    def start(self) -> None:
        """Prepare for the first pages."""
        scratch, lines = self.scratch, (slice(None), pl.ds(0, self.lines))
        scratch.largest[lines] = jnp.full_like(scratch.largest[lines], UNSEEN)
        scratch.total[lines] = jnp.zeros_like(scratch.total[lines])
        scratch.weighted[lines] = jnp.zeros_like(scratch.weighted[lines])
        for i in range(self.num_tokens):
            lines = slice(None), self._lines_of(i)
            if self.sinks is not None:
                sinks = self.sinks[...] * LOG2_E
                scratch.largest[lines] = jnp.broadcast_to(sinks, scratch.largest[lines].shape)
                scratch.total[lines] = jnp.ones_like(scratch.total[lines])
            if self.num_tokens > 1:
                assert scratch.queries is not None
                scratch.queries[lines] = self.q[self.token(i)].astype(jnp.float32)

    def attend_pages(self, pages: Pages, slot: jax.Array) -> None:
        """Fold the pages of a slot into the softmax.

        A chunk of keys that are not all seen is computed in halves. So a short context does not
        cost a whole chunk.
        """
        items, position = self.items, self.position
        chunk_pages = self.sizes.chunk_pages
        half_pages = chunk_pages // 2 if chunk_pages % 2 == 0 else chunk_pages

        def attend_keys(page: jax.Array, num_pages: int, *, masked: bool) -> None:
            """Fold the keys of a slot's pages from that one on."""
            in_slot = multiple_of(page * items.block_size, num_pages * items.block_size)
            # The first token's distance from the first key. It sees itself and what is before.
            distance = position - pages.first * items.block_size - in_slot
            keys = pl.ds(in_slot, num_pages * items.block_size)
            heads = self._batch_heads
            attend_heads = functools.partial(self._attend_heads, slot, keys, distance, masked)
            for_each(0, items.num_heads // heads, attend_heads)

        def attend_chunk(chunk: jax.Array) -> None:
            page = chunk * chunk_pages
            distance = position - (pages.first + page) * items.block_size
            is_whole = distance >= items.chunk_tokens - 1
            if self.config.sliding_window is not None:
                # For the last token, too.
                is_whole &= distance + (self.length - 1) < self.config.sliding_window
            pl.when(is_whole)(lambda: attend_keys(page, chunk_pages, masked=False))

            @pl.when(~is_whole)
            def _():
                num_pages = jnp.minimum(pages.end - pages.first - page, chunk_pages)

                def attend_half(half: jax.Array) -> None:
                    attend_keys(page + half * half_pages, half_pages, masked=True)

                for_each(0, cdiv(num_pages, half_pages), attend_half)

        for_each(0, cdiv(pages.end - pages.first, chunk_pages), attend_chunk)

    @property
    def _batch_heads(self) -> int:
        return self.sizes.batch_heads if self.num_tokens == 1 else self.sizes.short_batch_heads

    def _attend_heads(
        self, slot: jax.Array, tokens: Any, distance: jax.Array, masked: bool, batch: jax.Array
    ) -> None:
        """Fold keys of a slot into the softmax of a batch of heads."""
        config, scratch, dtype = self.config, self.scratch, self.q.dtype
        heads = pl.ds(batch * self._batch_heads, self._batch_heads)
        lines = (heads, pl.ds(0, self.lines))
        if self.num_tokens == 1:
            q = self.q[self.first_token, heads]  # [heads, lines, D]
        else:
            assert scratch.queries is not None
            q = scratch.queries[lines].astype(dtype)
        lanes = q.shape[-1]
        kv = self.items.slots[slot, heads, tokens, :]  # [heads, keys, W]
        keys, values = kv[..., :lanes].astype(dtype), kv[..., -lanes:]
        if masked:
            # Values past the context are garbage. A weight of zero would not remove NaN.
            values = keep_first_rows(values, distance + self.length)

        scores = batch_dot(q, keys, contract=(2, 2))
        # As much of the factor as possible is one constant.
        scores *= config.scale if config.soft_cap is not None else config.scale * LOG2_E
        if self.kv_scales is not None:
            scores *= self.kv_scales[heads, :, 0:1]
        if config.soft_cap is not None:
            scores = (config.soft_cap * LOG2_E) * jnp.tanh(scores / config.soft_cap)
        if masked:
            # This also replaces scores of garbage keys.
            distances = distance - lax.broadcasted_iota(jnp.int32, (1, 1, scores.shape[-1]), 2)
            distances += self._tokens_of_lines()
            is_seen = distances >= 0
            if config.sliding_window is not None:
                is_seen &= distances < config.sliding_window
            scores = jnp.where(is_seen, scores, UNSEEN)

        largest = scratch.largest[lines]  # [heads, lines, LANES]
        new_largest = jnp.maximum(largest, scores.max(axis=-1, keepdims=True))
        weights = jnp.exp2(scores - new_largest[..., :1])
        decay = jnp.exp2(largest - new_largest)
        scratch.largest[lines] = new_largest
        scratch.total[lines] = scratch.total[lines] * decay + weights.sum(axis=-1, keepdims=True)
        scratch.weighted[lines] = scratch.weighted[lines] * decay[..., :1] + batch_dot(
            weights.astype(dtype), values.astype(dtype), contract=(2, 1)
        )

    def store_output(self) -> None:
        """Store the result of the softmax."""
        for i in range(self.num_tokens):
            lines = slice(None), self._lines_of(i)
            out = self.scratch.weighted[lines] / self.scratch.total[lines][..., :1]
            if self.kv_scales is not None:
                out *= self.kv_scales[:, :, 1:2]
            self.out[self.first_output + i] = out.astype(self.out.dtype)

    def _lines_of(self, i: int) -> Any:
        """The lines of the i-th token."""
        return pl.ds(i * self.group_size, self.group_size)

    def _tokens_of_lines(self) -> int | jax.Array:
        """The index of each line's token: [1, lines, 1]."""
        if self.num_tokens == 1:
            return 0
        line = lax.broadcasted_iota(jnp.int32, (1, self.lines, 1), 1)
        # No division, which takes a TPU many instructions.
        firsts = range(self.group_size, self.lines, self.group_size)
        return sum(((line >= first).astype(jnp.int32) for first in firsts), jnp.zeros_like(line))

"""Attention of a decode or a short row: the online softmax of its queries over its pages.

The queries of a kv head, of all tokens and heads of the group, are lines of one matrix: line
token * G + head. The matrix unit holds keys and values, each once for all lines.
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
from jaxllm_kernels.ragged_paged_attention.tpu_items import Items, Pages
from jaxllm_kernels.ragged_paged_attention.tpu_layout import LANES, SUBLANES
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
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import KernelSizes


class RowScratch(NamedTuple):
    """On-chip memory of a row's M lines, of which a decode uses the first ones."""

    largest: Ref  # [K, M, LANES]: running softmax; all lanes are equal
    total: Ref  # [K, M, LANES]
    weighted: Ref  # [K, M, V]
    queries: Ref | None  # float32 [K, M, D]: of a short row

    @classmethod
    def shapes(cls, heads: int, lines: int, sizes: KernelSizes) -> "RowScratch":
        def of_lines(lanes: int) -> Any:
            return pltpu.VMEM((heads, lines, lanes), jnp.float32)

        return cls(
            largest=of_lines(LANES),
            total=of_lines(LANES),
            weighted=of_lines(sizes.layout.value_lanes),
            queries=of_lines(sizes.layout.lanes) if sizes.kind == "short" else None,
        )


class _Keys(NamedTuple):
    """Consecutive keys of a slot."""

    slot: jax.Array
    start: Any
    size: int
    # Of the row's first token from the first key. It sees itself and what is before.
    distance: jax.Array

    @property
    def in_slot(self) -> Any:
        return pl.ds(self.start, self.size)

    def cut(self, num_pieces: int) -> "list[_Keys]":
        """Equal pieces."""
        size = self.size // num_pieces
        firsts = range(0, self.size, size)
        return [
            _Keys(self.slot, multiple_of(self.start + first, size), size, self.distance - first)
            for first in firsts
        ]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a step, during tracing."""

    items: Items
    segment: jax.Array
    # The most tokens that the code computes. If the row has fewer, lines of the others have
    # arbitrary results, and `store_output` leaves them out, or puts them where later rows or
    # nobody's outputs are.
    num_tokens: int
    # The indices of the first token in q and in out.
    first_token: jax.Array
    first_output: jax.Array
    q: Ref  # [tokens, K, G, D]
    kv_scales: Ref | None  # [K, 1, 2]
    sinks: Ref | None  # [K, G, 1]
    out: Ref  # [tokens, K, G, V]
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

    def token(self, i: int | jax.Array) -> jax.Array:
        """The index of the i-th token in the operands, or of another token if there is none."""
        if isinstance(i, int) and i == 0:
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
        self._for_each_token(self._start_token)

    def _start_token(self, i: int | jax.Array) -> None:
        scratch, lines = self.scratch, (slice(None), self._lines_of(i))
        if self.sinks is None:
            scratch.largest[lines] = jnp.full_like(scratch.largest[lines], UNSEEN)
            scratch.total[lines] = jnp.zeros_like(scratch.total[lines])
        else:
            sinks = self.sinks[...] * LOG2_E
            scratch.largest[lines] = jnp.broadcast_to(sinks, scratch.largest[lines].shape)
            scratch.total[lines] = jnp.ones_like(scratch.total[lines])
        scratch.weighted[lines] = jnp.zeros_like(scratch.weighted[lines])
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
            start = multiple_of(page * items.block_size, num_pages * items.block_size)
            distance = position - pages.first * items.block_size - start
            keys = _Keys(slot, start, num_pages * items.block_size, distance)
            num_pieces = max(num_pages // self.sizes.piece_pages, 1)
            heads = items.num_heads // self._batch_heads
            lines = self.lines // self._batch_lines
            if lines > 1 and self.num_tokens > 1:
                # Those of the tokens that the row has.
                lines = cdiv(self.length * self.group_size, self._batch_lines)

            def attend_lines(batch: jax.Array) -> None:
                attend = functools.partial(self._attend_heads, keys, num_pieces, masked, batch)
                for_each(0, heads, attend)

            for_each(0, lines, attend_lines)

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

    @property
    def _batch_lines(self) -> int:
        return self.sizes.batch_lines if self.num_tokens == 1 else self.sizes.short_batch_lines

    def _attend_heads(
        self,
        keys: _Keys,
        num_pieces: int,
        masked: bool,
        line_batch: int | jax.Array,
        batch: jax.Array,
    ) -> None:
        """Fold keys into the softmax of a batch of heads, for a batch of their lines.

        The keys are computed in pieces: the scores of the next beside the weights of this one.
        """
        scratch = self.scratch
        heads = pl.ds(batch * self._batch_heads, self._batch_heads)
        first_line = multiple_of(line_batch * self._batch_lines, self._batch_lines)
        lines = (heads, pl.ds(first_line, self._batch_lines))
        if self.num_tokens == 1:
            q = self.q[self.first_token, *lines]  # [heads, lines, D]
        else:
            assert scratch.queries is not None
            q = scratch.queries[lines].astype(self.q.dtype)
        pieces = keys.cut(num_pieces)
        scores = self._score(q, heads, first_line, pieces[0], masked)
        for piece, following in itertools.pairwise(pieces):
            before = scores
            scores = self._score(q, heads, first_line, following, masked)
            self._fold(before, lines, piece, masked)
        self._fold(scores, lines, pieces[-1], masked)

    def _score(
        self,
        q: jax.Array,
        heads: Any,
        first_line: int | jax.Array,
        keys: _Keys,
        masked: bool,
    ) -> jax.Array:
        """The scores of the lines of some heads, from one of the lines on: [heads, lines, keys]."""
        config = self.config
        rows = self.items.slots[keys.slot, heads, keys.in_slot, : q.shape[-1]]
        scores = batch_dot(q, rows.astype(q.dtype), contract=(2, 2))
        # As much of the factor as possible is one constant.
        scores *= config.scale if config.soft_cap is not None else config.scale * LOG2_E
        if self.kv_scales is not None:
            scores *= self.kv_scales[heads, :, 0:1]
        if config.soft_cap is not None:
            scores = (config.soft_cap * LOG2_E) * jnp.tanh(scores / config.soft_cap)
        if masked:
            # This also replaces scores of garbage keys.
            key = lax.broadcasted_iota(jnp.int32, (1, 1, scores.shape[-1]), 2)
            distances = keys.distance - key + self._tokens_of_lines(first_line)
            is_seen = distances >= 0
            if config.sliding_window is not None:
                is_seen &= distances < config.sliding_window
            scores = jnp.where(is_seen, scores, UNSEEN)
        return scores

    def _fold(self, scores: jax.Array, lines: tuple[Any, Any], keys: _Keys, masked: bool) -> None:
        """Fold keys with these scores into the softmax of the lines of some heads."""
        scratch, dtype = self.scratch, self.q.dtype
        heads, _ = lines
        values = self.items.slots[keys.slot, heads, keys.in_slot, self.sizes.layout.values]
        if masked:
            # Values past the context are garbage. A weight of zero would not remove NaN.
            values = keep_first_rows(values, keys.distance + self.length)
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
        self._for_each_token(self._store_token)

    def _store_token(self, i: int | jax.Array) -> None:
        lines = slice(None), self._lines_of(i)
        out = self.scratch.weighted[lines] / self.scratch.total[lines][..., :1]
        if self.kv_scales is not None:
            out *= self.kv_scales[:, :, 1:2]
        self.out[self.first_output + i] = out.astype(self.out.dtype)

    def _for_each_token(self, body: Callable[[Any], None]) -> None:
        """Call body with the index of each token that the code computes; if a token has many lines,
        only with those that the row has."""
        is_cut = self.lines > self._batch_lines and self.group_size % SUBLANES == 0
        if self.num_tokens > 1 and is_cut:
            for_each(0, self.length, body)
        else:
            for i in range(self.num_tokens):
                body(i)

    def _lines_of(self, i: int | jax.Array) -> Any:
        """The lines of the i-th token."""
        return pl.ds(multiple_of(i * self.group_size, self.group_size), self.group_size)

    def _tokens_of_lines(self, first_line: int | jax.Array) -> int | jax.Array:
        """The index of the token of each line of a batch that begins with that line:
        [1, lines, 1]."""
        if self.num_tokens == 1:
            return 0
        line = first_line + lax.broadcasted_iota(jnp.int32, (1, self._batch_lines, 1), 1)
        # No division, which takes a TPU many instructions.
        firsts = range(self.group_size, self.lines, self.group_size)
        return sum(((line >= first).astype(jnp.int32) for first in firsts), jnp.zeros_like(line))

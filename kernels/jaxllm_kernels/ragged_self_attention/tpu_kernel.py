"""The TPU kernel for self-attention: keys and values of some heads stay on chip, and tiles of
queries walk over those that they see.

The grid goes over batches of kv heads, over parts of their query heads, and over tiles of queries.
Keys and values of a batch of heads, of all tokens, are read once. A tile computes the blocks of
keys from the first that any of its queries sees to the last. So the work grows with the lengths of
the rows, and not with the square of the batch.

Operands and results have tokens along lanes, as XLA lays out heads that fill no registers. Scores
are transposed, too, with keys along sublanes and queries along lanes: maxima over keys combine
registers, and weights are the stationary operand of the product with values. So keys alone are
turned, once for a batch of heads.

As in the prefill kernel (`ragged_paged_attention/tpu_prefill.py`), a step of the loop computes the
scores of a block beside the weights of the one before.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.ragged_paged_attention.tpu_layout import LANES, SUBLANES
from jaxllm_kernels.ragged_paged_attention.tpu_primitives import (
    LOG2_E,
    UNSEEN,
    Ref,
    divide,
    dot,
    for_each,
    multiple_of,
    registers,
)
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig
from jaxllm_kernels.ragged_self_attention.tpu_sizes import (
    Heads,
    KernelSizes,
    keys_of_query,
    vmem_bytes,
)

# On-chip memory that the compiler takes beside what the kernel asks for.
_OF_COMPILER = 8 << 20


class Tiles(NamedTuple):
    """What tiles of queries see, in scalar memory: int32 [tiles]."""

    first: jax.Array  # the first key that any query sees, rounded down to whole registers
    end: jax.Array  # behind the last one
    whole_first: jax.Array  # from here to there all queries see all keys
    whole_end: jax.Array
    num_real: jax.Array  # int32 [1]: the tokens that rows have


class _Scratch(NamedTuple):
    """On-chip memory with the lifetime of the call."""

    keys: Ref  # [kv heads, T, lanes]: turned, with zeros behind them
    values: Ref  # [kv heads, value rows, T]: with ones behind them
    queries: Ref  # [heads, lanes, M]: with zeros behind them
    scores: Ref  # [heads, keys of a block, M]
    block_largest: Ref  # [heads, SUBLANES, M]: a block's largest scores; the largest counts
    largest: Ref  # [heads, SUBLANES, M]: running softmax; all sublanes are equal
    weighted: Ref  # [heads, value rows, M]

    @classmethod
    def shapes(
        cls, num_tokens: int, heads: Heads, sizes: KernelSizes, dtype: jnp.dtype
    ) -> "_Scratch":
        rows, lanes = heads.value_rows(dtype), heads.lanes
        each_query = (sizes.heads, SUBLANES, sizes.tile)
        return cls(
            keys=pltpu.VMEM((sizes.kv_heads, num_tokens, lanes), dtype),
            values=pltpu.VMEM((sizes.kv_heads, rows, num_tokens), dtype),
            queries=pltpu.VMEM((sizes.heads, lanes, sizes.tile), dtype),
            scores=pltpu.VMEM((sizes.heads, sizes.block, sizes.tile), jnp.float32),
            block_largest=pltpu.VMEM(each_query, jnp.float32),
            largest=pltpu.VMEM(each_query, jnp.float32),
            weighted=pltpu.VMEM((sizes.heads, rows, sizes.tile), jnp.float32),
        )


def run(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tiles: Tiles,
    sees: jax.Array,
    *,
    sizes: KernelSizes,
    config: SelfAttentionConfig,
    num_rows: int,
    interpret: Any,
) -> jax.Array:
    """Attend from q [N, H, T] to k [K, H, T] and v [K, V, T]; `sees` int32 [tiles, 2, M] has the
    first key of each query, and the one behind its last. Return [N, V, T]; queries that see nothing
    have zeros."""
    heads = Heads(len(q), len(k), q.shape[1], v.shape[1])
    num_tokens = q.shape[2]
    num_parts = sizes.kv_heads * heads.group // sizes.heads

    def of_tile(size: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (sizes.heads, size, sizes.tile),
            lambda batch, part, tile, *_: (batch * num_parts + part, 0, tile),
        )

    def held(size: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (sizes.kv_heads, size, num_tokens),
            lambda batch, part, tile, *_: (batch, 0, 0),
            **({} if sizes.buffers == 2 or interpret else {"pipeline_mode": pl.Buffered(1)}),
        )

    out_shape = jax.ShapeDtypeStruct((len(q), heads.value_size, num_tokens), q.dtype)
    seen = num_tokens * keys_of_query(num_tokens, num_rows, config) * heads.num_heads
    return pl.pallas_call(
        functools.partial(_step, heads=heads, sizes=sizes, config=config),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tiles),
            grid=(heads.num_kv_heads // sizes.kv_heads, num_parts, num_tokens // sizes.tile),
            in_specs=[
                of_tile(heads.head_size),
                held(heads.head_size),
                held(heads.value_size),
                pl.BlockSpec((1, 2, sizes.tile), lambda batch, part, tile, *_: (tile, 0, 0)),
            ],
            out_specs=of_tile(heads.value_size),
            scratch_shapes=_Scratch.shapes(num_tokens, heads, sizes, q.dtype),
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=vmem_bytes(num_tokens, heads, sizes, q.dtype) + _OF_COMPILER,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * (heads.head_size + heads.value_size) * seen,
            transcendentals=seen,
            bytes_accessed=(q.size + k.size + v.size + out_shape.size) * q.dtype.itemsize,
        ),
        interpret=interpret,
        name="ragged_self_attention",
    )(*tiles, q, k, v, sees)


def _step(*refs: Ref, heads: Heads, sizes: KernelSizes, config: SelfAttentionConfig) -> None:
    num_tiles = len(Tiles._fields)
    q, k, v, sees, out, *scratch = refs[num_tiles:]
    step = _Step(
        tiles=Tiles(*refs[:num_tiles]),
        q=q,
        k=k,
        v=v,
        sees=sees,
        out=out,
        scratch=_Scratch(*scratch),
        heads=heads,
        sizes=sizes,
        config=config,
    )
    step.run()


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step of the grid, during tracing."""

    tiles: Tiles
    q: Ref  # [heads, H, M]
    k: Ref  # [kv heads, H, T]
    v: Ref  # [kv heads, V, T]
    sees: Ref  # [1, 2, M]
    out: Ref  # [heads, V, M]
    scratch: _Scratch
    heads: Heads
    sizes: KernelSizes
    config: SelfAttentionConfig

    def run(self) -> None:
        part, tile = pl.program_id(1), pl.program_id(2)
        first, end = self.tiles.first[tile], self.tiles.end[tile]
        pl.when((part == 0) & (tile == 0))(self._take_keys_and_values)

        @pl.when(first < end)
        def _():
            self._take_queries()
            self._attend(tile, first, end)
            self._store_output()

        @pl.when(first >= end)
        def _():
            self.out[...] = jnp.zeros_like(self.out)

    def _take_keys_and_values(self) -> None:
        """Take those of all tokens that a tile may read. Values behind the rows become zeros: a
        weight of zero would not remove NaN."""
        keys, values, block = self.scratch.keys, self.scratch.values, self.sizes.block
        num_tokens, num_real = keys.shape[1], self.tiles.num_real[0]
        # A block may begin at any multiple of LANES below the end of the rows.
        num_blocks = jnp.minimum(divide(num_real, block) + 2, num_tokens // block)

        def take_block(index: jax.Array) -> None:
            tokens = pl.ds(multiple_of(index * block, block), block)
            token = index * block + lax.broadcasted_iota(jnp.int32, (1, block), 1)
            for kv_head in range(self.sizes.kv_heads):
                key = _filled(self.k[kv_head, :, tokens], self.heads.lanes, 0)
                keys[kv_head, tokens] = key.T.astype(keys.dtype)
                value = jnp.where(
                    token < num_real, self.v[kv_head, :, tokens].astype(jnp.float32), 0.0
                )
                value = _filled(value, values.shape[1], 1)
                values[kv_head, :, tokens] = value.astype(values.dtype)

        for_each(0, num_blocks, take_block)

    def _take_queries(self) -> None:
        queries = self.scratch.queries
        for head in range(self.sizes.heads):
            queries[head] = _filled(self.q[head], queries.shape[1], 0).astype(queries.dtype)

    def _attend(self, tile: jax.Array, first: jax.Array, end: jax.Array) -> None:
        scratch, block = self.scratch, self.sizes.block
        num_blocks = divide(end - first + (block - 1), block)
        last_begin = self.k.shape[2] - block
        whole_first, whole_end = self.tiles.whole_first[tile], self.tiles.whole_end[tile]
        scratch.largest[...] = jnp.full_like(scratch.largest, UNSEEN)
        scratch.weighted[...] = jnp.zeros_like(scratch.weighted)

        def begin_of(index: jax.Array) -> jax.Array:
            # The last block may not move past the batch.
            return multiple_of(jnp.minimum(first + index * block, last_begin), LANES)

        def attend_block(index: jax.Array) -> None:
            """Compute the scores of a block beside the weights of the one before."""
            wanted = first + index * block
            begin, before = begin_of(index), begin_of(index - 1)

            def score_and_fold(*, masked: bool) -> None:
                sees = self._is_seen(begin, wanted) if masked else None
                for head in range(self.sizes.heads):
                    # The scores are issued first: their products take longest.
                    scores, largest = scratch.scores[head], scratch.block_largest[head]
                    self._score(head, begin, sees)
                    self._fold(head, before, scores, largest)

            is_whole = (whole_first <= wanted) & (wanted + block <= whole_end)
            pl.when(is_whole)(lambda: score_and_fold(masked=False))
            pl.when(~is_whole)(lambda: score_and_fold(masked=True))

        begin = begin_of(jnp.int32(0))
        sees = self._is_seen(begin, first)
        for head in range(self.sizes.heads):
            self._score(head, begin, sees)
        for_each(1, num_blocks, attend_block)
        begin = begin_of(num_blocks - 1)
        for head in range(self.sizes.heads):
            self._fold(head, begin, scratch.scores[head], scratch.block_largest[head])

    def _is_seen(self, begin: jax.Array, wanted: jax.Array) -> jax.Array:
        """Whether the queries see the keys of a block: [keys, M]."""
        shape = (self.sizes.block, self.sizes.tile)
        key = begin + lax.broadcasted_iota(jnp.int32, shape, 0)
        # Keys before `wanted` are those of the block before.
        first = jnp.maximum(self.sees[0, 0:1], wanted)
        return (key >= first) & (key < self.sees[0, 1:2])

    def _score(self, head: int, begin: jax.Array, sees: jax.Array | None) -> None:
        """Compute a head's scores of the keys of a block."""
        keys = self.scratch.keys[self._kv_head(head), pl.ds(begin, self.sizes.block)]
        scores = dot(keys, self.scratch.queries[head], contract=(1, 0))
        scores *= self.config.scale * LOG2_E
        if sees is not None:
            # This also replaces scores of garbage keys.
            scores = jnp.where(sees, scores, UNSEEN)
        self.scratch.scores[head] = scores
        self.scratch.block_largest[head] = registers(scores).max(axis=0)

    def _fold(
        self, head: int, begin: jax.Array, scores: jax.Array, block_largest: jax.Array
    ) -> None:
        """Fold a block, given a head's scores of it, into the softmax."""
        scratch = self.scratch
        values = scratch.values[self._kv_head(head), :, pl.ds(begin, self.sizes.block)]
        largest = scratch.largest[head]
        new_largest = jnp.maximum(largest, block_largest.max(axis=0, keepdims=True))
        weights = jnp.exp2(scores - new_largest[:1])
        decay = jnp.exp2(largest - new_largest)
        scratch.largest[head] = new_largest
        scratch.weighted[head] = scratch.weighted[head] * decay[:1] + dot(
            values, weights.astype(values.dtype), contract=(1, 0)
        )

    def _store_output(self) -> None:
        weighted, size = self.scratch.weighted, self.heads.value_size
        is_real = self.sees[0, 1:2] > 0
        for head in range(self.sizes.heads):
            factor = 1 / weighted[head, size : size + 1]
            out = jnp.where(is_real, weighted[head, :size] * factor, 0.0)
            self.out[head] = out.astype(self.out.dtype)

    def _kv_head(self, head: int) -> int | jax.Array:
        """The index among the kv heads in memory of that of a query head."""
        if self.sizes.heads == self.sizes.kv_heads * self.heads.group:
            return head // self.heads.group
        return divide(pl.program_id(1) * self.sizes.heads + head, self.heads.group)


def _filled(x: jax.Array, num_rows: int, number: int) -> jax.Array:
    """x [rows, lanes] with so many rows, in float32, of which others are cut without loss."""
    x = x.astype(jnp.float32)
    more = num_rows - len(x)
    return jnp.concatenate([x, jnp.full((more, x.shape[1]), number, x.dtype)]) if more else x

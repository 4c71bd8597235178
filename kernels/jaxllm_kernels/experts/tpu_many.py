"""The TPU kernel for many tokens: an expert is multiplied by those that have chosen it.

All tokens and all sums stay on the chip during a call. An item, which is some choices of an expert,
gathers its tokens there, and adds its outputs to their sums. So no row of a choice is written to
memory, and the sums go over experts in the order of their numbers.

Rows of 16-bit numbers share 32-bit words with their neighbours, and cannot be moved alone. So a
token is kept as words that have two of its own numbers.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.common import round_up
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights
from jaxllm_kernels.experts.tpu_blocks import (
    Ref,
    WeightRefs,
    columns,
    intermediate,
    outputs,
    weight_operands,
)
from jaxllm_kernels.experts.tpu_sizes import LANES, ROW_TILE, SUBLANES, Blocks, ManySizes
from jaxllm_kernels.experts.tpu_work import Work, make_work


def run_many(
    x: jax.Array,
    chosen: jax.Array,
    factors: jax.Array,
    weights: ExpertWeights,
    *,
    config: ExpertsConfig,
    blocks: Blocks,
    sizes: ManySizes,
    interpret: Any,
) -> jax.Array:
    """`api.ExpertsOp` for as many tokens as the sizes are for."""
    num_tokens = round_up(len(x), ROW_TILE)
    num_choices = chosen.size
    num_experts = weights.num_experts
    work, num_items = make_work(chosen, factors, num_experts, sizes.item_rows)
    operands, specs = weight_operands(weights, blocks, emulated=bool(interpret))
    words, width = sizes.word_lanes, sizes.token_lanes
    x = jnp.pad(x, ((0, num_tokens - len(x)), (0, width - x.shape[1])))
    rows, dtype = sizes.item_rows, x.dtype
    in_place = pl.BlockSpec(memory_space=pl.ANY)
    y = pl.pallas_call(
        functools.partial(
            _step,
            config=config,
            blocks=blocks,
            sizes=sizes,
            has_bias=weights.gate_up_bias is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(work),
            grid=(num_items, blocks.num_steps),
            in_specs=[in_place, *specs],
            out_specs=in_place,
            scratch_shapes=[
                _Scratch(
                    words=pltpu.VMEM((num_tokens, words), sizes.word_dtype(dtype)),
                    sums=pltpu.VMEM(
                        (blocks.num_outer, num_tokens + SUBLANES, blocks.outer), jnp.float32
                    ),
                    gathered=pltpu.VMEM((rows, words), sizes.word_dtype(dtype)),
                    factors=pltpu.VMEM((rows, LANES), jnp.float32),
                    rows=pltpu.VMEM((rows, width), dtype),
                    inner=pltpu.VMEM((rows, blocks.padded_size), dtype),
                    outputs=pltpu.VMEM((sizes.tile_rows, blocks.outer), jnp.float32),
                    copied=pltpu.SemaphoreType.DMA(()),
                )
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, blocks.padded_hidden_size), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=sizes.vmem_bytes(blocks, num_tokens, dtype),
        ),
        cost_estimate=pl.CostEstimate(
            flops=blocks.flops(num_choices),
            transcendentals=num_choices * blocks.size,
            bytes_accessed=sum(array.nbytes for array in operands) + 3 * x.nbytes,
        ),
        interpret=interpret,
        name="experts_many",
    )(*work, x, *operands)
    return y[: len(chosen), : blocks.hidden_size]


class _Scratch(NamedTuple):
    """The kernel's memory on the chip."""

    words: Ref  # [tokens, words]: all tokens
    sums: Ref  # float32 [blocks of outputs, tokens + 8, outputs]; the last rows are of no token
    gathered: Ref  # [rows, words]: the tokens of an item
    factors: Ref  # float32 [rows, lanes]: of an item, in all lanes
    rows: Ref  # [rows, lanes]: the tokens of an item, in their own dtype
    inner: Ref  # [rows, F]
    outputs: Ref  # float32 [tile, outputs of a block]
    copied: Ref  # a semaphore


def _step(
    *refs: Ref, config: ExpertsConfig, blocks: Blocks, sizes: ManySizes, has_bias: bool
) -> None:
    work = Work(*refs[: len(Work._fields)])
    x, *rest = refs[len(Work._fields) :]
    weights, (y, memory) = WeightRefs.take(rest, blocks, has_bias=has_bias)
    item, step = pl.program_id(0), pl.program_id(1)
    tile_rows = sizes.tile_rows
    num_tiles = _cdiv(work.counts[item], tile_rows)

    @pl.when((item == 0) & (step == 0))
    def _():
        _load_tokens(x, memory)

    @pl.when(step == 0)
    def _():
        _gather(item, work, memory, config, sizes)

    @pl.when(step < blocks.num_inner)
    def _():
        here = columns(step, blocks.inner, blocks.num_inner)

        def compute(tile: jax.Array, _: None) -> None:
            at = _rows_of(tile, tile_rows)
            memory.inner[at, here] = intermediate(
                memory.rows[at, : blocks.hidden_size],
                weights,
                config=config,
                blocks=blocks,
            )

        lax.fori_loop(0, num_tiles, compute, None)

    @pl.when(step >= blocks.num_inner)
    def _():
        block = step - blocks.num_inner

        def compute(tile: jax.Array, _: None) -> None:
            at = _rows_of(tile, tile_rows)
            output = outputs(memory.inner[at, : blocks.size], weights, blocks=blocks)
            if not config.scales_input:
                output = output * memory.factors[at, :1]
            memory.outputs[...] = output
            _add(item, tile * tile_rows, block, work, memory, sizes)

        lax.fori_loop(0, num_tiles, compute, None)

    @pl.when((item == pl.num_programs(0) - 1) & (step == blocks.num_steps - 1))
    def _():
        for block in range(blocks.num_outer):
            to = y.at[:, pl.ds(block * blocks.outer, blocks.outer)]
            _copy(memory.sums.at[block, : len(y)], to, memory.copied)


def _rows_of(tile: jax.Array, tile_rows: int) -> Any:
    return pl.ds(pl.multiple_of(tile * tile_rows, tile_rows), tile_rows)


def _cdiv(a: jax.Array, b: int) -> jax.Array:
    """Divide a number that is not negative, and round up."""
    return lax.div(a + (b - 1), b)


def _copy(source: Ref, destination: Ref, copied: Ref) -> None:
    copy = pltpu.make_async_copy(source, destination, copied)
    copy.start()
    copy.wait()


def _load_tokens(x: Ref, memory: _Scratch) -> None:
    """Keep all tokens as words, and make their sums zero."""
    num_tokens, num_rows = len(x), len(memory.rows)
    for start in range(0, num_tokens, num_rows):
        size = min(num_rows, num_tokens - start)
        copy = pltpu.make_async_copy(x.at[pl.ds(start, size)], memory.rows.at[:size], memory.copied)
        copy.start()
        copy.wait()

        def keep(tile: jax.Array, _: None, start: int = start) -> None:
            at = _rows_of(tile, ROW_TILE)
            to = pl.ds(pl.multiple_of(start + tile * ROW_TILE, ROW_TILE), ROW_TILE)
            memory.words[to] = _to_words(memory.rows[at], memory.words.shape[1])

        lax.fori_loop(0, size // ROW_TILE, keep, None)

    def clear(tile: jax.Array, _: None) -> None:
        for block in range(len(memory.sums)):
            at = block, _rows_of(tile, SUBLANES)
            memory.sums[at] = jnp.zeros((SUBLANES, memory.sums.shape[2]), jnp.float32)

    lax.fori_loop(0, memory.sums.shape[1] // SUBLANES, clear, None)


def _gather(
    item: jax.Array, work: Work, memory: _Scratch, config: ExpertsConfig, sizes: ManySizes
) -> None:
    """Put an item's tokens into its rows. The last rows of a group may be other items' tokens."""
    start, count = work.starts[item], work.counts[item]

    def gather(group: jax.Array, _: None) -> None:
        for i in range(SUBLANES):
            row = group * SUBLANES + i
            token = work.tokens[start + row]
            memory.gathered[pl.ds(row, 1)] = memory.words[pl.ds(token, 1)]
            factor = jnp.full((1, LANES), work.factors[start + row])
            memory.factors[pl.ds(row, 1)] = factor

    def put(tile: jax.Array, _: None) -> None:
        at = _rows_of(tile, sizes.tile_rows)
        rows = _from_words(memory.gathered[at], memory.rows.dtype)
        if config.scales_input:
            rows = (rows.astype(jnp.float32) * memory.factors[at, :1]).astype(rows.dtype)
        memory.rows[at] = rows

    lax.fori_loop(0, _cdiv(count, SUBLANES), gather, None)
    lax.fori_loop(0, _cdiv(count, sizes.tile_rows), put, None)


def _add(
    item: jax.Array,
    first: jax.Array,
    block: jax.Array,
    work: Work,
    memory: _Scratch,
    sizes: ManySizes,
) -> None:
    """Add the outputs of a tile, whose first row it is of the item, to their tokens' sums."""
    start, count = work.starts[item] + first, work.counts[item] - first
    nobody = memory.sums.shape[1] - SUBLANES

    def add(group: jax.Array, _: None) -> None:
        rows = [group * SUBLANES + i for i in range(SUBLANES)]
        tokens = [jnp.where(row < count, work.tokens[start + row], nobody) for row in rows]
        at = [(block, pl.ds(token, 1)) for token in tokens]
        # Tokens of an item differ, so all sums of a group are read before any is written.
        sums = [
            memory.sums[place] + memory.outputs[pl.ds(row, 1)]
            for place, row in zip(at, rows, strict=True)
        ]
        for place, row in zip(at, sums, strict=True):
            memory.sums[place] = row

    num_rows = jnp.minimum(count, sizes.tile_rows)
    lax.fori_loop(0, _cdiv(num_rows, SUBLANES), add, None)


def _to_words(x: jax.Array, num_words: int) -> jax.Array:
    """Pairs of 16-bit numbers as words: number i is in the low half of word i."""
    if x.dtype == jnp.float32:
        return x
    # A float32 has the 16 bits in its upper half.
    low, high = (_bits(x[:, half * num_words :][:, :num_words]) for half in (0, 1))
    return high | lax.shift_right_logical(low, 16)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)


def _from_words(words: jax.Array, dtype: jnp.dtype) -> jax.Array:
    if dtype == jnp.float32:
        return words
    low, high = words << 16, words & -(1 << 16)
    halves = [lax.bitcast_convert_type(half, jnp.float32).astype(dtype) for half in (low, high)]
    return jnp.concatenate(halves, axis=1)

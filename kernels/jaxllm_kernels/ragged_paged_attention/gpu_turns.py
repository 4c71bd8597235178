"""How two compute warpgroups of a Hopper GPU take turns with blocks of keys.

Both read the same blocks, which a producer warpgroup fetches (`gpu_blocks`), for 64 queries each.
One computes its softmax weights while the other uses the tensor cores (the ping-pong of
FlashAttention-3). This is an item of two blocks:

    turn               1           2            3           4            5
    warpgroup 0   q.k  |  softmax  |  p.v  q.k  |  softmax  |  p.v       |
    warpgroup 1        |  q.k      |  softmax   |  p.v q.k  |  softmax   |  p.v

Each turn is a phase of one barrier, at which both warpgroups arrive. So both arrive equally often:
warpgroup 1 once before its first block, warpgroup 0 once after its last, and both for the same
blocks. A warpgroup arrives when it has issued q.k, before the product is there, and when it has its
weights, before the values are there. It waits for p.v before it issues the next q.k. Warpgroup 0 is
a turn ahead, so it can change the values of a block for both, before it multiplies by them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxllm_kernels.ragged_paged_attention.gpu_blocks import (
    KEYS,
    VALUES,
    BlockRing,
    RingRefs,
    operand_transforms,
)
from jaxllm_kernels.ragged_paged_attention.gpu_tuning import GROUP_TOKENS, NUM_GROUPS

# Registers per thread: of the producer, and of each compute warpgroup. A thread block starts with
# 168 for each of its three warpgroups. A warpgroup that requests more than the others have released
# waits forever, so the sum is at most 504.
REGISTERS = (40, 232)

MATRIX = plgpu.Layout.WGMMA
PER_TOKEN = plgpu.Layout.WGMMA.reduce(1)
PER_KEY = plgpu.Layout.WGMMA.reduce(0)


class Softmax(NamedTuple):
    """A running softmax of a warpgroup's queries."""

    weighted: jax.Array  # float32 [GROUP_TOKENS, H]: the sum of weighted values
    largest: jax.Array  # float32 [GROUP_TOKENS]: the largest score
    total: jax.Array  # float32 [GROUP_TOKENS]: the sum of weights

    @classmethod
    def begin(cls, score: Any, head_size: int) -> "Softmax":
        """Return the softmax of a single key, with this score and a value of zero."""
        score = jnp.full((GROUP_TOKENS,), score, jnp.float32)
        return cls(
            plgpu.layout_cast(jnp.zeros((GROUP_TOKENS, head_size), jnp.float32), MATRIX),
            plgpu.layout_cast(score, PER_TOKEN),
            plgpu.layout_cast(jnp.ones_like(score), PER_TOKEN),
        )


@dataclass(frozen=True, kw_only=True)
class Turns:
    """A kernel's references, of a warpgroup that takes turns with another one."""

    ring: BlockRing
    blocks: RingRefs
    turn: Any  # a barrier with NUM_GROUPS arrivals
    group: Any  # the warpgroup: 0 or 1
    weights: Any  # shared memory: see `weights_scratch`

    def take(self) -> None:
        """Arrive at the end of a turn, and wait for it."""
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)

    def attend_block(
        self,
        softmax: Softmax,
        queries: Any,
        block: Any,
        to_scores: Callable[[jax.Array], tuple[jax.Array, Any]],
        change_values: Callable[[], None] | None = None,
    ) -> Softmax:
        """Add a block, counted from the kernel's start, to the softmax of queries [tokens, H].

        `to_scores` returns scores of the products of queries and keys, and a positive factor by
        which they must still be multiplied. `change_values` is called when the values are there.
        """
        weighted, largest, total = softmax
        head_size, block_tokens = weighted.shape[1], self.ring.block_tokens
        keys = self.ring.wait(self.blocks, KEYS, block)

        def multiply(accumulator):
            plgpu.wgmma(accumulator, queries, keys.T)
            self.take()
            return accumulator[...]

        shape = (GROUP_TOKENS, block_tokens)
        products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        self.ring.release(self.blocks, KEYS, block)
        scores, factor = to_scores(products)
        new_largest = jnp.maximum(largest, scores.max(axis=1) * factor)
        decay = jnp.exp2(largest - new_largest)
        p = jnp.exp2(scores * factor - over_columns(new_largest, block_tokens))
        weighted = weighted * over_columns(decay, head_size)
        total = total * decay + p.sum(axis=1)
        # All of this must be computed before the other warpgroup's turn ends.
        weighted, new_largest, total, p = lax.optimization_barrier(
            (weighted, new_largest, total, p.astype(self.ring.dtype))
        )
        plgpu.barrier_arrive(self.turn)
        values = self.ring.wait(self.blocks, VALUES, block)
        if change_values is not None:
            change_values()
        plgpu.barrier_wait(self.turn)
        staged = None if self.weights is None else self.weights.at[self.group]
        weighted = _accumulate(weighted, p, values, staged)
        self.ring.release(self.blocks, VALUES, block)
        return Softmax(weighted, new_largest, total)

    def skip_block(self, block: Any) -> None:
        """Take the turns of a block of which this warpgroup's queries see nothing."""
        # A reader that released a stage before its block is there might do so for a later block
        # before the other reader does for this one.
        for which in (KEYS, VALUES):
            self.ring.wait(self.blocks, which, block)
            self.take()
            self.ring.release(self.blocks, which, block)


def weights_scratch(ring: BlockRing) -> Any:
    """Shared memory for weights in interpret mode, which takes no operands from registers."""
    return plgpu.SMEM(
        (NUM_GROUPS, GROUP_TOKENS, ring.block_tokens),
        ring.dtype,
        transforms=operand_transforms(ring.head_size, ring.dtype),
    )


def _accumulate(weighted, p, values, staged) -> Any:
    """weighted + p @ values, with p in registers; in interpret mode through shared memory.

    Interpret mode supports neither left operands in registers nor accumulators with a value.
    """
    if staged is None:
        return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, p, values))(
            plgpu.WGMMAAccumulatorRef.init(weighted)
        )
    staged[...] = p
    plgpu.commit_smem()

    def multiply(accumulator):
        plgpu.wgmma(accumulator, staged, values)
        return accumulator[...]

    return weighted + pl.run_scoped(
        multiply, plgpu.WGMMAAccumulatorRef(weighted.shape, jnp.float32)
    )


def over_columns(x, num_columns: int):
    """x [tokens] as every column of a [tokens, num_columns]."""
    return lax.broadcast_in_dim(x, (*x.shape, num_columns), [0])


def over_rows(x, num_rows: int):
    """x [keys] as every row of a [num_rows, keys]."""
    return lax.broadcast_in_dim(x, (num_rows, *x.shape), [1])


def iota(length: int, layout):
    return plgpu.broadcasted_iota(jnp.int32, (length,), 0, layout=layout)

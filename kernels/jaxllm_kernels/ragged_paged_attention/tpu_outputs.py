"""Outputs of steps with short rows.

The last row of a step may have tokens of the next one. So outputs are no blocks of the grid: a step
collects them on chip, and copies them to their tokens when it ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.ragged_paged_attention.tpu_primitives import Ref
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import KernelSizes


class OutputScratch(NamedTuple):
    """On-chip memory with the lifetime of the call."""

    collected: Ref  # [2, tokens, K, G, V]: of this step, and of the one before
    num_tokens: Ref  # int32 [2]: that are sent
    sent: Ref  # semaphores [2]

    @classmethod
    def shapes(
        cls, sizes: KernelSizes, shape: tuple[int, ...], dtype: jnp.dtype
    ) -> "OutputScratch":
        """The memory for outputs of that shape."""
        return cls(
            collected=pltpu.VMEM((2, sizes.output_tokens, *shape), dtype),
            num_tokens=pltpu.SMEM((2,), jnp.int32),
            sent=pltpu.SemaphoreType.DMA((2,)),
        )


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The copies of steps' outputs, during tracing."""

    scratch: OutputScratch
    out: Ref  # [T, all heads, G, V]
    first_head: jax.Array  # of this group

    def start(self) -> None:
        """Prepare for the first step."""
        for buffer in range(2):
            self.scratch.num_tokens[buffer] = 0

    def open(self) -> None:
        """Wait for the step before the last, whose memory this one uses."""
        self._for_each_copy(0, self._buffer(), lambda copy: copy.wait())

    def of_step(self) -> Ref:
        """The memory of this step's outputs: [tokens, K, G, V]."""
        return self.scratch.collected.at[self._buffer()]

    def send(self, start: jax.Array, num_tokens: jax.Array) -> None:
        """Copy the outputs of a step to the tokens from `start` on."""
        buffer = self._buffer()
        self.scratch.num_tokens[buffer] = num_tokens
        self._for_each_copy(start, buffer, lambda copy: copy.start())

    def finish(self) -> None:
        """Wait for what is left after the last step."""
        for buffer in range(2):
            self._for_each_copy(0, buffer, lambda copy: copy.wait())

    def _buffer(self) -> jax.Array:
        return lax.rem(pl.program_id(1), 2)

    def _for_each_copy(
        self, start: int | jax.Array, buffer: int | jax.Array, action: Callable[[Any], None]
    ) -> None:
        """Call action with the copies of a buffer. A copy has a fixed size, so there is one for
        each binary digit of the number of tokens."""
        num_tokens = self.scratch.num_tokens[buffer]
        heads = pl.ds(self.first_head, self.scratch.collected.shape[2])
        for digit in reversed(range(self.scratch.collected.shape[1].bit_length())):
            size = 1 << digit
            first = num_tokens & (-2 * size)
            copy = pltpu.make_async_copy(
                self.scratch.collected.at[buffer, pl.ds(first, size)],
                self.out.at[pl.ds(start + first, size), heads],
                self.scratch.sent.at[buffer],
            )
            pl.when(num_tokens & size != 0)(lambda copy=copy: action(copy))

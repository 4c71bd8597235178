"""Writes segments to the cache by themselves, before a prefill on a TPU.

A tile of a prefill writes the keys and values of its own tokens, in its turn. Tokens of an image
see all of it (`RaggedBatch.last_seen`), and an image may have several tiles. So this kernel, which
runs first, writes those segments that an earlier segment of their row sees. It also writes rows
that do not attend, such as fresh ones of latent attention. A step may have none of either, and the
grid then has one step.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.ragged_paged_attention.tpu_items import NUM_STATES, Items
from jaxllm_kernels.ragged_paged_attention.tpu_kernel import run_step
from jaxllm_kernels.ragged_paged_attention.tpu_new import NewTokens
from jaxllm_kernels.ragged_paged_attention.tpu_primitives import Ref, for_each
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import KernelSizes
from jaxllm_kernels.ragged_paged_attention.tpu_work import Work, WrittenWork


def write_segments(
    new: jax.Array,
    cache: jax.Array,
    written: WrittenWork,
    *,
    name: str,
    sizes: KernelSizes,
    max_blocks: int,
    interpret: pltpu.InterpretParams | Literal[False],
) -> jax.Array:
    """Write segments into the cache, and return it.

    Args:
      name: of the op.
      new: keys and values as cached, but of the queries' dtype: [K, tokens, W].
      cache: [blocks, K, block_size, W].
      sizes: of the prefill, perhaps with larger tiles.
    """
    num_kv_heads, block_size, width = cache.shape[1:]
    heads = num_kv_heads // sizes.head_groups
    scalars = [x for x in written.work if x is not None]
    in_place = pl.BlockSpec(memory_space=pl.ANY)
    slot_tokens = sizes.slot_pages * block_size
    return pl.pallas_call(
        functools.partial(_write_step, sizes=sizes, max_blocks=max_blocks, dtype=new.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(sizes.head_groups, written.num_steps),
            in_specs=[
                pl.BlockSpec(
                    (heads, sizes.step_tokens, width), lambda group, step, *_: (group, step, 0)
                ),
                in_place,
            ],
            out_specs=in_place,
            scratch_shapes=[
                pltpu.VMEM((sizes.num_slots, heads, slot_tokens, width), cache.dtype),
                pltpu.SMEM((NUM_STATES,), jnp.int32),
                pltpu.SemaphoreType.DMA((sizes.num_slots,)),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        input_output_aliases={len(scalars) + 1: 0},
        # As of the prefill: see `attend_segments`.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=sizes.vmem_limit_bytes,
            disable_bounds_checks=True,
        ),
        # Most steps have nothing to write, or a part of their tokens.
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=new.size * new.dtype.itemsize
        ),
        interpret=interpret,
        name=f"{name}_write",
    )(*scalars, new, cache)


@dataclass(frozen=True, kw_only=True)
class _WriteStep:
    """A step of the grid, during tracing."""

    items: Items
    new_tokens: NewTokens

    def start(self) -> None:
        """Prepare for the first step."""

    def finish(self) -> None:
        """Wait for what is left after the last step."""

    def attend(self, step: jax.Array, first: jax.Array, end: jax.Array) -> None:
        """Write the segments of a step."""
        del step
        for_each(first, end, self._write_segment)

    def _write_segment(self, segment: jax.Array) -> None:
        items, new_tokens = self.items, self.new_tokens

        def write_item(item: jax.Array) -> None:
            pages, slot = items.pages(segment, item), items.take_slot()
            items.wait(pages, slot)
            new_tokens.insert(segment, pages, slot)
            # The next segment may have tokens in the last page.
            new_tokens.for_each_write(segment, pages, slot, lambda copy: copy.wait())
            items.fetch_next()

        for_each(jnp.int32(0), items.num_items(segment), write_item)


def _write_step(*refs: Ref, sizes: KernelSizes, max_blocks: int, dtype: jnp.dtype) -> None:
    """Name the references, and write the segments of a step."""
    *scalars, new, _, cache, slots, state, fetched, sent = refs
    items = Items(
        work=Work(*scalars),
        cache=cache,
        slots=slots,
        state=state,
        fetched=fetched,
        sizes=sizes,
        # The pages from that of the first token on.
        sliding_window=1,
        max_blocks=max_blocks,
    )
    new_tokens = NewTokens(items=items, new=new, sent=sent, sizes=sizes, dtype=dtype)
    run_step(_WriteStep(items=items, new_tokens=new_tokens), items)

"""The kernels of the TPU backend: attention over pages that they fetch and update themselves.

The grid walks over steps of query tokens. A segment is what a step computes of one row: a decode, a
short row, or the tokens of a prefill chunk in the step's tile. `tpu_items.py` fetches the pages of
segments ahead of `tpu_decode.py` and `tpu_prefill.py`, which compute them.

Axis letters besides those of api.py: G query heads per kv head, M query lines of a segment
(G x tokens), D lanes of a query, V lanes of an output, W lanes of a token's key and value in the
cache.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig
from jaxllm_kernels.ragged_paged_attention.tpu_decode import DecodeScratch, DecodeStep
from jaxllm_kernels.ragged_paged_attention.tpu_items import NUM_STATES, Items
from jaxllm_kernels.ragged_paged_attention.tpu_prefill import PrefillScratch, PrefillStep
from jaxllm_kernels.ragged_paged_attention.tpu_primitives import Ref
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import KernelSizes
from jaxllm_kernels.ragged_paged_attention.tpu_work import Work


def scratch_shapes(
    sizes: KernelSizes,
    slots: jax.ShapeDtypeStruct,
    *,
    group_size: int,
    dtype: jnp.dtype,
) -> list[Any]:
    """The on-chip memory of a kernel: of its items, then of its steps."""
    scratch = PrefillScratch if sizes.kind == "prefill" else DecodeScratch
    return [
        pltpu.VMEM(slots.shape, slots.dtype),
        pltpu.SMEM((NUM_STATES,), jnp.int32),
        pltpu.SemaphoreType.DMA((sizes.num_slots,)),
        scratch.shapes(sizes, slots, group_size, dtype),
    ]


def compute_step(
    *refs: Ref,
    config: AttentionConfig,
    sizes: KernelSizes,
    max_blocks: int,
    has_scales: bool,
    has_sinks: bool,
    sees_ahead: bool,
) -> None:
    """Name the references, and compute the step."""
    unnamed = iter(refs)
    is_given = {"num_decodes": sizes.kind == "short", "ends": sees_ahead}
    names = [name for name in Work._fields if is_given.get(name, True)]
    work = Work(**dict(zip(names, unnamed, strict=False)))
    q, new = next(unnamed), next(unnamed)
    kv_scales = next(unnamed) if has_scales else None
    sinks = next(unnamed) if has_sinks else None
    ahead = next(unnamed) if sees_ahead else None
    next(unnamed)  # the cache as an operand; it is the same memory as the result
    out, cache = next(unnamed), next(unnamed)
    items = Items(
        work=work,
        cache=cache,
        slots=next(unnamed),
        state=next(unnamed),
        fetched=next(unnamed),
        sizes=sizes,
        sliding_window=config.sliding_window,
        max_blocks=max_blocks,
    )
    operands = {
        "items": items,
        "q": q,
        "new": new,
        "kv_scales": kv_scales,
        "sinks": sinks,
        "out": out,
        "config": config,
        "sizes": sizes,
    }
    if sizes.kind == "prefill":
        step = PrefillStep(scratch=next(unnamed), ahead=ahead, **operands)
    else:
        step = DecodeStep(scratch=next(unnamed), **operands)
    run_step(step, items)


class Step(Protocol):
    """A step of the grid, during tracing."""

    def start(self) -> None:
        """Prepare for the first step."""
        ...

    def attend(self, step: jax.Array, first: jax.Array, end: jax.Array) -> None:
        """Compute the segments [first, end) of a step."""
        ...

    def finish(self) -> None:
        """Wait for what is left after the last step."""
        ...


def run_step(step: Step, items: Items) -> None:
    """Compute a step, and what comes before the first one and after the last."""
    first_segments = items.work.first_segments
    row_group = lax.rem(pl.program_id(0), items.sizes.row_groups)
    index = pl.program_id(1) * items.sizes.row_groups + row_group

    @pl.when(pl.program_id(1) == 0)
    def _():
        items.start(row_group)
        step.start()

    step.attend(index, first_segments[index], first_segments[index + 1])
    pl.when(pl.program_id(1) == pl.num_programs(1) - 1)(step.finish)

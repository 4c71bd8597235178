"""The `pallas_call` of the TPU kernel: the memory of each operand, and the blocks of each step."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig
from jaxllm_kernels.ragged_paged_attention.tpu_kernel import compute_step, scratch_shapes
from jaxllm_kernels.ragged_paged_attention.tpu_sizes import KernelSizes
from jaxllm_kernels.ragged_paged_attention.tpu_work import Work


def attend_segments(
    q: jax.Array,
    new: jax.Array,
    cache: jax.Array,
    work: Work,
    *,
    name: str,
    config: AttentionConfig,
    sizes: KernelSizes,
    max_blocks: int,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    interpret: pltpu.InterpretParams | Literal[False],
    num_steps: jax.Array | None = None,
    ahead: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write the segments' keys and values into the cache and attend; see `KernelSizes`.

    Args:
      name: of the op.
      q: [tokens, K, G, D], or [K, G, tokens, D] for tiles of prefill chunks.
      new: keys and values as cached, but of q's dtype: [tokens, K, W] or [K, tokens, W].
      cache: [blocks, K, block_size, W].
      sinks: float32 [K, G, 1].
      kv_scales: float32 [K, 1, 2], of keys and of values.
      num_steps: with short rows, the number of steps that have segments.
      ahead: int32 [steps, tokens of a step], of prefills: how far ahead each token sees.

    Returns:
      The output, shaped like q but with lanes of values; and the updated cache. For tokens without
      a segment the output is zero, or with short rows arbitrary.
    """
    num_kv_heads, block_size, width = cache.shape[1:]
    group_size = config.num_heads // num_kv_heads
    lanes, value_lanes, parts = q.shape[-1], sizes.layout.value_lanes, sizes.group_parts
    out_shape = (*q.shape[:-1], value_lanes)
    heads = num_kv_heads // sizes.head_groups
    if num_steps is None:
        num_tokens = q.shape[2] if sizes.kind == "prefill" else q.shape[0]
        assert num_tokens % (sizes.step_tokens * sizes.row_groups) == 0, (q.shape, sizes)
        steps = num_tokens // (sizes.step_tokens * sizes.row_groups)
    else:
        steps = pl.cdiv(num_steps, sizes.row_groups)

    def at(group: jax.Array, i: jax.Array) -> dict[str, jax.Array]:
        """The head group and the step of a step of the grid."""
        step = i * sizes.row_groups + lax.rem(group, sizes.row_groups)
        return {"heads": lax.div(group, sizes.row_groups), "step": step}

    def block(shape: tuple[int | None, ...], *index: str) -> pl.BlockSpec:
        """The BlockSpec of an operand; `index` names the axes of head groups and steps."""

        def start(group: jax.Array, i: jax.Array, *_: jax.Array) -> tuple[int | jax.Array, ...]:
            where = at(group, i)
            return tuple(where.get(axis, 0) for axis in index)

        return pl.BlockSpec(shape, start)

    def window(*shape: int | None) -> pl.BlockSpec:
        """The BlockSpec of the tokens that a step's segments may have; the next axis has heads."""

        def start(group: jax.Array, i: jax.Array, *_: jax.Array) -> tuple[int | jax.Array, ...]:
            where = at(group, i)
            first_head = where["heads"] * (shape[0] or 1)
            return sizes.window_start(where["step"]), first_head, *[0] * (len(shape) - 1)

        axes = (pl.Squeezed() if n is None else pl.Element(n) for n in shape)
        return pl.BlockSpec((pl.Element(sizes.window_tokens), *axes), start)

    in_place = pl.BlockSpec(memory_space=pl.ANY)
    if sizes.kind != "prefill":
        # Blocks have whole tiles of rows, or all rows.
        new = new.reshape(-1, sizes.head_groups, heads, width)
    if sizes.kind == "short":
        q_block = window(heads, group_size, lanes)
        new_block = window(None, heads, width)
        out_block = in_place
    elif sizes.kind == "decode":

        def of_step(lanes: int) -> pl.BlockSpec:
            return block((sizes.step_tokens, heads, group_size, lanes), "step", "heads", "", "")

        q_block, out_block = of_step(lanes), of_step(value_lanes)
        new_block = block((sizes.step_tokens, None, heads, width), "step", "heads", "", "")
    else:
        q = q.reshape(num_kv_heads * parts, group_size // parts, *q.shape[2:])

        def of_tile(lanes: int) -> pl.BlockSpec:
            shape = heads * parts, group_size // parts, sizes.step_tokens, lanes
            return block(shape, "heads", "", "step", "")

        q_block, out_block = of_tile(lanes), of_tile(value_lanes)
        new_block = block((heads, sizes.step_tokens, width), "heads", "step", "")
        if sinks is not None:
            # Along the query lines of a segment.
            sinks = sinks.reshape(num_kv_heads * parts, -1, 1)
            sinks = jnp.repeat(sinks, sizes.step_tokens, axis=1).swapaxes(1, 2)
    optional = []
    if kv_scales is not None:
        optional.append((kv_scales, block((heads, 1, 2), "heads", "", "")))
    if sinks is not None:
        per_group = heads * len(sinks) // num_kv_heads
        optional.append((sinks, block((per_group, *sinks.shape[1:]), "heads", "", "")))
    if ahead is not None:
        # Along the query lines of a segment.
        ahead = jnp.tile(ahead, (1, group_size // parts))[:, None]
        optional.append((ahead, block((1, *ahead.shape[1:]), "step", "", "")))
    scalars = [x for x in work if x is not None]
    operands = (*scalars, q, new, *[x for x, _ in optional], cache)
    slots = jax.ShapeDtypeStruct(
        (sizes.num_slots, heads, sizes.slot_pages * block_size, width), cache.dtype
    )
    kernel = functools.partial(
        compute_step,
        config=config,
        sizes=sizes,
        max_blocks=max_blocks,
        has_scales=kv_scales is not None,
        has_sinks=sinks is not None,
        sees_ahead=ahead is not None,
    )
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(sizes.head_groups * sizes.row_groups, steps),
            in_specs=[
                *(q_block, new_block),
                *[x_block for _, x_block in optional],
                in_place,
            ],
            out_specs=[out_block, in_place],
            scratch_shapes=scratch_shapes(sizes, slots, group_size=group_size, dtype=q.dtype),
        ),
        out_shape=[
            jax.ShapeDtypeStruct((*q.shape[:-1], value_lanes), q.dtype),
            jax.ShapeDtypeStruct(cache.shape, cache.dtype),
        ],
        input_output_aliases={len(operands) - 1: 1},
        # Groups share nothing, so a chip with two cores runs one on each. The steps of a group run
        # in order, because their items are one sequence.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=sizes.vmem_limit_bytes,
            # Checking a page's bounds takes longer than issuing its copy. Only blocks of contexts
            # are followed; tests in the emulator, which always checks bounds, verify that.
            disable_bounds_checks=True,
        ),
        cost_estimate=_estimate_cost(config, q, new, cache, work, max_blocks),
        interpret=interpret,
        name=f"{name}_{sizes.kind}",
    )
    out, cache = call(*operands)
    return out.reshape(out_shape), cache


def interpreter(chip: Chip) -> pltpu.InterpretParams:
    """The parameters that emulate a chip on a CPU, with checks for races and bounds.

    A copy is done when it starts. If the kernel does not wait for it, the emulator then reports a
    race. If copies were done when they are waited for, a copy without a wait would never happen,
    and tests might miss that.
    """
    return pltpu.InterpretParams(
        detect_races=True, dma_execution_mode="eager", num_cores_or_threads=chip.num_cores
    )


def _estimate_cost(
    config: AttentionConfig,
    q: jax.Array,
    new: jax.Array,
    cache: jax.Array,
    work: Work,
    max_blocks: int,
) -> pl.CostEstimate:
    """Estimate the cost for rows with half of the longest context.

    Lengths are unknown at compile time, but a kernel cannot read more than the cache has.
    """
    num_blocks, _, block_size, _ = cache.shape
    num_queries = q.size // q.shape[-1]
    scores = num_queries * min(max_blocks // 2 + 1, num_blocks) * block_size
    read_blocks = min(work.block_tables.size // 2 + 1, num_blocks)
    page_bytes = cache.size // num_blocks * cache.dtype.itemsize
    return pl.CostEstimate(
        flops=2 * scores * (config.head_size + config.value_size),
        transcendentals=scores,
        bytes_accessed=read_blocks * page_bytes + (2 * q.size + new.size) * q.dtype.itemsize,
    )

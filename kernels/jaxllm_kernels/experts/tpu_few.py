"""The TPU kernel for few tokens: all of them are multiplied by every expert that any has chosen.

The time is that of reading weights, so products with tokens that have not chosen the expert cost
nothing, and neither sorting nor gathering pays. The grid walks over the chosen experts in the order
of their numbers, and over an expert's blocks: intermediate values stay on the chip, and sums, too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights
from jaxllm_kernels.experts.tpu_blocks import (
    Ref,
    WeightRefs,
    columns,
    intermediate,
    outputs,
    weight_operands,
)
from jaxllm_kernels.experts.tpu_sizes import Blocks, few_vmem_bytes


def run_few(
    x: jax.Array,
    chosen: jax.Array,
    factors: jax.Array,
    weights: ExpertWeights,
    *,
    config: ExpertsConfig,
    blocks: Blocks,
    interpret: Any,
) -> jax.Array:
    """`api.ExpertsOp` for few tokens."""
    num_tokens, num_choices = chosen.shape
    num_experts = weights.num_experts
    experts, count = _chosen_experts(chosen, num_experts)
    operands, specs = weight_operands(weights, blocks, emulated=bool(interpret))

    def whole(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))

    most = min(num_experts, num_tokens * num_choices)
    y = pl.pallas_call(
        functools.partial(
            _step,
            config=config,
            blocks=blocks,
            has_bias=weights.gate_up_bias is not None,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            # Without any item the sums would not be written.
            grid=(jnp.maximum(count, 1), blocks.num_steps),
            in_specs=[whole(*x.shape), whole(*chosen.shape), whole(*factors.shape), *specs],
            out_specs=whole(num_tokens, blocks.padded_hidden_size),
            scratch_shapes=[pltpu.VMEM((num_tokens, blocks.padded_size), x.dtype)],
        ),
        out_shape=jax.ShapeDtypeStruct((num_tokens, blocks.padded_hidden_size), jnp.float32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=few_vmem_bytes(blocks, num_tokens, num_choices, x.dtype),
        ),
        cost_estimate=pl.CostEstimate(
            flops=most * blocks.flops(num_tokens),
            transcendentals=most * num_tokens * blocks.size,
            bytes_accessed=most * blocks.flops(1) // 2 * jnp.dtype(blocks.stored.dtype).itemsize,
        ),
        interpret=interpret,
        name="experts_few",
    )(experts, x, chosen, factors, *operands)
    return y[:, : blocks.hidden_size]


def _chosen_experts(chosen: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """The experts of a device that any token has chosen, in ascending order, and their number. Sums
    of what is compared are one fused reduction each; a sort or a scatter would not be."""
    numbers = jnp.arange(num_experts, dtype=jnp.int32)
    is_chosen = (chosen[:, :, None] == numbers).any((0, 1))
    num_before = jnp.sum(is_chosen & (numbers < numbers[:, None]), axis=1, dtype=jnp.int32)
    is_at = is_chosen & (num_before == numbers[:, None])
    return jnp.sum(jnp.where(is_at, numbers, 0), axis=1), jnp.sum(is_chosen, dtype=jnp.int32)


def _step(
    experts: Ref,
    x: Ref,
    chosen: Ref,
    factors: Ref,
    *refs: Ref,
    config: ExpertsConfig,
    blocks: Blocks,
    has_bias: bool,
) -> None:
    weights, (y, inner) = WeightRefs.take(refs, blocks, has_bias=has_bias)
    item, step = pl.program_id(0), pl.program_id(1)
    is_choice = chosen[...] == experts[item]
    factor = jnp.sum(jnp.where(is_choice, factors[...], 0), axis=1, keepdims=True)

    @pl.when((item == 0) & (step == 0))
    def _():
        y[...] = jnp.zeros_like(y)

    @pl.when(step < blocks.num_inner)
    def _():
        rows = x[...]
        if config.scales_input:
            rows = (rows.astype(jnp.float32) * factor).astype(x.dtype)
        here = columns(step, blocks.inner, blocks.num_inner)
        inner[:, here] = intermediate(rows, weights, config=config, blocks=blocks)

    @pl.when(step >= blocks.num_inner)
    def _():
        output = outputs(inner[:, : blocks.size], weights, blocks=blocks)
        if not config.scales_input:
            output = output * factor
        here = columns(step - blocks.num_inner, blocks.outer, blocks.num_outer)
        # Zero times what another token's expert makes of this one may be no number.
        is_here = jnp.sum(is_choice.astype(jnp.float32), axis=1, keepdims=True) > 0
        y[:, here] += jnp.where(is_here, output, 0)

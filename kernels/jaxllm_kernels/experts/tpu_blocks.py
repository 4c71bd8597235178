"""What both TPU kernels compute with a block of weights, and which block each step has."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxllm_kernels.coded import CodedWeight
from jaxllm_kernels.experts.api import ExpertsConfig, ExpertWeights, between
from jaxllm_kernels.experts.tpu_sizes import LANES, Blocks
from jaxllm_kernels.tpu_product import product

# A reference to memory. (Type checkers know only a part of `jax.Ref`.)
Ref = Any


class WeightRefs(NamedTuple):
    """The blocks of a step. Scales are those of codes, one row for each group of inputs."""

    gate_up: Ref  # [1, halves, inner, D], or turned
    down: Ref  # [1, outer, F], or turned
    gate_up_scales: Ref | None  # [1, halves, groups, inner]
    down_scales: Ref | None  # [1, groups, outer]
    gate_up_bias: Ref | None  # [1, halves, inner]
    down_bias: Ref | None  # [1, 1, outer]

    @classmethod
    def take(
        cls, refs: Sequence[Ref], blocks: Blocks, *, has_bias: bool
    ) -> tuple["WeightRefs", Sequence[Ref]]:
        """The first references of a kernel, which are those of its operands in the order of
        `weight_operands`, and the others."""
        rest = iter(refs)
        matrices = next(rest), next(rest)
        none = None, None
        scales = (next(rest), next(rest)) if blocks.stored.gate_up_groups else none
        biases = (next(rest), next(rest)) if has_bias else none
        return cls(*matrices, *scales, *biases), tuple(rest)


def weight_operands(
    weights: ExpertWeights, blocks: Blocks, *, emulated: bool
) -> tuple[list[jax.Array], list[pl.BlockSpec]]:
    """The weights as operands of a kernel, and the blocks of a step of its grid [items, steps].

    The kernel's first prefetched scalars are the experts of its items. While a step computes, the
    block of the next step is loaded, and no other. So the memory is as busy as it can be: a block
    of outputs is not loaded together with one of intermediate values, except for the first item.
    """
    last_inner, last_outer = blocks.num_inner - 1, blocks.num_outer - 1

    def inner(item: jax.Array, step: jax.Array, experts: Ref, *_: Ref) -> tuple:
        return experts[item], jnp.minimum(step, last_inner)

    def outer(item: jax.Array, step: jax.Array, experts: Ref, *_: Ref) -> tuple:
        # Until its first block of outputs, an item keeps the last one of the item before.
        is_before = (step <= last_inner) & (item > 0)
        block = jnp.where(is_before, last_outer, jnp.maximum(step - blocks.num_inner, 0))
        return experts[jnp.where(is_before, item - 1, item)], block

    def gate_up(*where: Any) -> tuple:
        expert, block = inner(*where)
        return expert, 0, *_turned((block, 0), blocks.turns_gate_up)

    def down(*where: Any) -> tuple:
        expert, block = outer(*where)
        return expert, *_turned((block, 0), blocks.turns_down)

    gate_up_shape = _turned((blocks.inner, blocks.hidden_size), blocks.turns_gate_up)
    down_shape = _turned((blocks.outer, blocks.size), blocks.turns_down)
    gate_up_array, down_array = (
        matrix.codes if isinstance(matrix, CodedWeight) else matrix
        for matrix in (weights.gate_up, weights.down)
    )
    # In memory the axes are in this order already.
    operands = [
        gate_up_array.swapaxes(2, 3) if blocks.turns_gate_up else gate_up_array,
        down_array.swapaxes(1, 2) if blocks.turns_down else down_array,
    ]
    if isinstance(weights.gate_up, CodedWeight) and isinstance(weights.down, CodedWeight):
        # So are these: an output has fewer groups than a register has lanes.
        operands += [weights.gate_up.scales.swapaxes(2, 3), weights.down.scales.swapaxes(1, 2)]
    if not emulated:
        # Otherwise XLA might load all experts into VMEM in advance, where these are small.
        operands = [pltpu.with_memory_space_constraint(array, pltpu.HBM) for array in operands]
    specs = [
        pl.BlockSpec((1, blocks.num_halves, *gate_up_shape), gate_up),
        pl.BlockSpec((1, *down_shape), down),
    ]
    if blocks.stored.gate_up_groups:

        def gate_up_scales(*where: Any) -> tuple:
            expert, block = inner(*where)
            return expert, 0, 0, block

        def down_scales(*where: Any) -> tuple:
            expert, block = outer(*where)
            return expert, 0, block

        _, num_inner, num_outer = blocks.stored
        specs += [
            pl.BlockSpec((1, blocks.num_halves, num_inner, blocks.inner), gate_up_scales),
            pl.BlockSpec((1, num_outer, blocks.outer), down_scales),
        ]
    if weights.gate_up_bias is not None:
        operands.append(weights.gate_up_bias)

        def gate_up_bias(*where: Any) -> tuple:
            expert, block = inner(*where)
            return expert, 0, block

        specs.append(pl.BlockSpec((1, blocks.num_halves, blocks.inner), gate_up_bias))
    if weights.down_bias is not None:
        operands.append(weights.down_bias[:, None])

        def down_bias(*where: Any) -> tuple:
            expert, block = outer(*where)
            return expert, 0, block

        specs.append(pl.BlockSpec((1, 1, blocks.outer), down_bias))
    return operands, specs


def _turned(pair: tuple, is_turned: bool) -> tuple:
    return pair[::-1] if is_turned else pair


def intermediate(
    rows: jax.Array, weights: WeightRefs, *, config: ExpertsConfig, blocks: Blocks
) -> jax.Array:
    """The intermediate values of a block, for these rows."""
    scales, bias = weights.gate_up_scales, weights.gate_up_bias
    halves = [
        product(
            rows,
            weights.gate_up[0, half],
            None if scales is None else scales[0, half],
            blocks.turns_gate_up,
        )
        for half in range(blocks.num_halves)
    ]
    if bias is not None:
        halves = [x + bias[0, pl.ds(half, 1)] for half, x in enumerate(halves)]
    return between(halves, config).astype(rows.dtype)


def outputs(inner: jax.Array, weights: WeightRefs, *, blocks: Blocks) -> jax.Array:
    """The outputs of a block, in float32."""
    scales, bias = weights.down_scales, weights.down_bias
    output = product(
        inner, weights.down[0], None if scales is None else scales[0], blocks.turns_down
    )
    return output if bias is None else output + bias[0].astype(jnp.float32)


def columns(block: jax.Array, size: int, num_blocks: int) -> Any:
    """The columns of a block in an array that has those of all blocks."""
    if num_blocks == 1:
        return slice(None)
    return pl.ds(pl.multiple_of(block * size, LANES), size)

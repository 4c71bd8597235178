"""Products with codes of 8 bits on TPUs whose inputs have a scale for each group.

Where an output has one scale, XLA widens codes in registers and needs no kernel. With groups it
would write the products of every group to memory, or loop over groups. This kernel loads a block of
outputs while it computes the one before, so a decode takes as long as the codes take to load.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxllm_kernels.coded import CodedWeight, CodeForm
from jaxllm_kernels.common import cdiv
from jaxllm_kernels.dense.api import NoNeed
from jaxllm_kernels.experts.tpu_sizes import (
    block_of,
    is_turned,
    matrix_bytes,
    padded_bytes,
    vmem_budget,
)
from jaxllm_kernels.platform import CHIPS, Chip
from jaxllm_kernels.tpu_product import WIDENED_INPUTS, check_codes, product

_MIB = 1 << 20
# About the most bytes of a block of codes, and the most rows that are multiplied by it, the best
# first. A tile of rows reads all codes.
_BLOCK_BYTES = (4 * _MIB, 2 * _MIB, _MIB)
_TILE_ROWS = (512, 256, 128, 64, 32, 16)
# Groups of inputs that are multiplied without a loop: more would be more code, not less time.
_GROUPS_AT_ONCE = 8
# On-chip memory that the compiler itself needs, rounded up.
_RESERVE = 2 * _MIB


class _Sizes(NamedTuple):
    rows: int  # of a tile
    outputs: int  # of a block
    vmem_bytes: int


@dataclass(frozen=True, kw_only=True)
class TpuCodedMatmul:
    """`api.CodedMatmul` on TPUs, for codes of 8 bits in groups of inputs."""

    # The chip to compile for, or to emulate.
    chip: str
    name: str = "tpu"
    # The devices that a weight [out, in] is cut over, and their axes by which its outputs and its
    # inputs are cut. XLA cannot partition a Pallas call.
    mesh: Mesh | None = None
    cut: tuple[str | None, str | None] = (None, None)
    # A size in place of that which follows from the chip; tests make it small.
    block_bytes: int | None = None
    # Emulate the kernel on a CPU, with a race detector.
    interpret: bool = False

    def held(self, form: CodeForm, num_outputs: int, num_inputs: int) -> CodeForm:
        check_codes(form, num_inputs)
        if form.group is None:
            raise NoNeed("XLA needs no kernel where an output has one scale")
        self._sizes(_TILE_ROWS[0], num_outputs, num_inputs, form.num_groups(num_inputs))
        return form

    def __call__(self, x: jax.Array, weight: CodedWeight) -> jax.Array:
        rows = x.reshape(-1, x.shape[-1])
        mesh, (outputs, inputs) = self.mesh, self.cut
        if mesh is None:
            y = self._multiply(rows, weight)
        else:

            def of_device(rows: jax.Array, weight: CodedWeight) -> jax.Array:
                y = self._multiply(rows, weight)
                if inputs is None:
                    return y
                # The devices exchange what the model's dtype has of their sums.
                return jax.lax.psum(y.astype(rows.dtype), inputs).astype(jnp.float32)

            spec = PartitionSpec(outputs, inputs)
            # Of one group all devices have the scale.
            of_scales = spec if weight.num_groups > 1 else PartitionSpec(outputs, None)
            y = jax.shard_map(
                of_device,
                mesh=mesh,
                in_specs=(
                    PartitionSpec(None, inputs),
                    replace(weight, codes=spec, scales=of_scales),  # pyright: ignore
                ),
                out_specs=PartitionSpec(None, outputs),
                check_vma=False,
            )(rows, weight)
        return y.reshape(*x.shape[:-1], -1)

    def _sizes(self, num_rows: int, num_outputs: int, num_inputs: int, num_groups: int) -> _Sizes:
        """The largest tile of rows, and then the largest block of codes, that fit into a core's
        memory."""
        chip = CHIPS.get(self.chip, Chip(name=self.chip, platform="tpu"))
        turned = is_turned(num_outputs, num_inputs)
        blocks = _BLOCK_BYTES if self.block_bytes is None else (self.block_bytes,)
        for tile, block_bytes in itertools.product(_TILE_ROWS, blocks):
            rows = min(tile, num_rows)
            outputs = block_of(num_outputs, num_inputs, block_bytes)
            x = padded_bytes((rows, num_inputs), jnp.bfloat16) * 2  # may be float32
            codes = matrix_bytes(outputs, num_inputs, turned, jnp.int8)
            scales = padded_bytes((num_groups, outputs), jnp.float32)
            y = padded_bytes((rows, outputs), jnp.float32)
            widened = padded_bytes((outputs, WIDENED_INPUTS), jnp.float32)
            taken = 2 * (x + codes + scales + y) + 3 * y + widened + _RESERVE
            if taken <= vmem_budget(chip):
                return _Sizes(rows, outputs, taken)
        raise ValueError(
            f"a weight of {num_outputs} x {num_inputs} takes more on-chip memory than a kernel on "
            f"{self.chip} gets, {vmem_budget(chip) // _MIB} MiB"
        )

    def _multiply(self, x: jax.Array, weight: CodedWeight) -> jax.Array:
        """The product of one device."""
        # Importing Pallas takes long, and other platforms do not need it.
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        (num_rows, num_inputs), num_outputs = x.shape, len(weight.codes)
        if not num_rows:
            return jnp.zeros((0, num_outputs), jnp.float32)
        num_groups = weight.num_groups
        sizes = self._sizes(num_rows, num_outputs, num_inputs, num_groups)
        turned = is_turned(num_outputs, num_inputs)

        each = _GROUPS_AT_ONCE if num_groups % _GROUPS_AT_ONCE == 0 else num_groups
        size = each * num_inputs // num_groups

        def multiply(x: Any, codes: Any, scales: Any, y: Any) -> None:
            def part(index: Any) -> jax.Array:
                here = pl.ds(pl.multiple_of(index * size, size), size)
                groups = pl.ds(pl.multiple_of(index * each, each), each)
                of_groups = codes[here] if turned else codes[:, here]
                return product(x[:, here], of_groups, scales[groups], turned)

            def add(index: jax.Array, _: None) -> None:
                y[...] += part(index)

            if each == num_groups:
                y[...] = product(x[...], codes[...], scales[...], turned)
            else:
                y[...] = part(0)
                jax.lax.fori_loop(1, num_groups // each, add, None)

        if turned:
            of_codes = pl.BlockSpec((num_inputs, sizes.outputs), lambda row, block: (0, block))
        else:
            of_codes = pl.BlockSpec((sizes.outputs, num_inputs), lambda row, block: (block, 0))
        return pl.pallas_call(
            multiply,
            grid=(cdiv(num_rows, sizes.rows), cdiv(num_outputs, sizes.outputs)),
            in_specs=[
                pl.BlockSpec((sizes.rows, num_inputs), lambda row, block: (row, 0)),
                of_codes,
                pl.BlockSpec((num_groups, sizes.outputs), lambda row, block: (0, block)),
            ],
            out_specs=pl.BlockSpec((sizes.rows, sizes.outputs), lambda row, block: (row, block)),
            out_shape=jax.ShapeDtypeStruct((num_rows, num_outputs), jnp.float32),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=sizes.vmem_bytes
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * num_rows * num_outputs * num_inputs,
                transcendentals=0,
                bytes_accessed=weight.codes.nbytes + x.nbytes + 4 * num_rows * num_outputs,
            ),
            interpret=self._interpreter(),
            name="coded_matmul",
        )(x, weight.codes.T if turned else weight.codes, weight.scales.T)

    def _interpreter(self) -> Any:
        if not self.interpret:
            return False
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager")

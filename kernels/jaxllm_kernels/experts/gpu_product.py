"""Products of rows with the matrices of their experts, on Hopper GPUs.

Rows lie in tiles of R, and all rows of a tile belong to one expert. So a tile needs no masks: what
it has beyond the expert's rows is computed and never read. Both products of an expert are this
kernel: gate and up, or up alone, with the activation, then down.

The outputs of a matrix are the instruction's wide operand (64), rows are the narrow one (8 to 128):
an expert of a decode has few rows. A matrix is given in parts, which an item computes at the same
time: gate and up, or the halves of one matrix. An item is a tile and, for each compute warpgroup,
64 outputs of every part. The grid is persistent, and a worker takes every 132nd item. Adjacent
items are tiles of the same outputs, so that an expert's tiles find its matrix in L2.

A producer warpgroup fills a ring of stages with 64 inputs of an item's outputs and rows. It waits
for free stages only, so the ring does not drain between items.

An output is summed over its inputs in their order, by one warpgroup. So it does not depend on the
other rows, nor on how many there are. Every column of the instruction is a row of its own, so a
NaN stays there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from jaxllm_kernels.compat import smem_transforms

OUTPUTS = 64  # of a warpgroup and a part: the rows of a matrix instruction
INPUTS = 64  # of a stage: the widest swizzle, 128 bytes of 16-bit numbers

# Rows of an output that are staged at a time, to leave the memory to the ring.
_STAGED_ROWS = 64

# Shared memory of a thread block beside ring and outputs, for barriers and alignment.
_RESERVED_BYTES = 2048
_SHARED_BYTES = 227 * 1024
_MOST_STAGES = 12

_PER_OUTPUT = plgpu.Layout.WGMMA.reduce(1)

# Registers per thread of the producer and of each compute warpgroup, by their number. A thread
# block of two warpgroups starts with 255 for each, one of three with 168. The sum must not grow.
_REGISTERS = {1: (40, 232), 2: (40, 232)}


@dataclass(frozen=True, kw_only=True)
class Product:
    """The static part of a call."""

    name: str
    tile_rows: int
    num_groups: int  # compute warpgroups
    num_workers: int
    # From the parts' products, float32 [OUTPUTS, R] each, to the outputs that are stored.
    finish: Callable[[list[Any]], list[Any]]
    num_finished: int
    out_dtype: DTypeLike
    # Whether all tiles have the same rows.
    shares_rows: bool = False
    interpret: Any = False

    def num_stages(self, num_parts: int, dtype: DTypeLike) -> int:
        """As many stages as fit."""
        itemsize = jnp.dtype(dtype).itemsize
        stage = (num_parts * self.num_groups * OUTPUTS + self.tile_rows) * INPUTS * itemsize
        staged = self.num_groups * min(self.tile_rows, _STAGED_ROWS) * OUTPUTS
        outputs = staged * jnp.dtype(self.out_dtype).itemsize
        return min((_SHARED_BYTES - _RESERVED_BYTES - outputs) // stage, _MOST_STAGES)

    def __call__(
        self,
        rows: jax.Array,
        weights: jax.Array,
        bias: jax.Array | None,
        experts: jax.Array,
        ends: jax.Array,
    ) -> jax.Array:
        """Return [tiles * R, finished parts, N].

        Args:
          rows: [tiles * R, K], or [R, K] for all tiles.
          weights: [E, parts, N, K].
          bias: [E, parts, N].
          experts: int32 [tiles], the expert of each tile; a tile of none, outside of [0, E), is
            skipped.
          ends: int32, whose last number is how many of them there are.
        """
        num_experts, num_parts, num_outputs, num_inputs = weights.shape
        tile_rows, num_groups = self.tile_rows, self.num_groups
        item_outputs = OUTPUTS * num_groups
        assert num_outputs % item_outputs == 0 and num_inputs % INPUTS == 0, weights.shape
        num_blocks, num_steps = num_outputs // item_outputs, num_inputs // INPUTS
        num_stages = self.num_stages(num_parts, rows.dtype)
        num_matrices = num_parts * num_groups
        staged_out = min(tile_rows, _STAGED_ROWS)

        def kernel(
            rows_ref,
            weights_ref,
            bias_ref,
            experts_ref,
            ends_ref,
            out_ref,
            *,
            staged_rows,
            staged_weights,
            outputs,
            full,
            free,
        ):
            group = lax.axis_index("warpgroup")
            worker = lax.axis_index("worker")
            tiles = ends_ref[ends.shape[0] - 1]
            num_items = lax.div(
                tiles * num_blocks - worker + self.num_workers - 1, self.num_workers
            )

            def read_item(i):
                item = worker + i * self.num_workers
                tile, block = lax.rem(item, tiles), lax.div(item, tiles)
                expert = experts_ref[tile]
                is_expert = (expert >= 0) & (expert < num_experts)
                steps = jnp.where(is_expert, jnp.int32(num_steps), jnp.int32(0))
                return tile, block * item_outputs, expert, steps

            def produce():
                plgpu.set_max_registers(_REGISTERS[num_groups][0], action="decrease")

                def send_item(i, sent):
                    tile, first_output, expert, steps = read_item(i)
                    of_tile: Any = slice(None)
                    if not self.shares_rows:
                        row = pl.multiple_of(tile * tile_rows, tile_rows)
                        of_tile = pl.ds(row, tile_rows)

                    def send(step, sent):
                        stage = lax.rem(sent, jnp.int32(num_stages))

                        @pl.when(sent >= num_stages)
                        def _():
                            plgpu.barrier_wait(free.at[stage])

                        inputs = pl.ds(pl.multiple_of(step * INPUTS, INPUTS), INPUTS)
                        for matrix in range(num_matrices):
                            part, of_group = divmod(matrix, num_groups)
                            output = pl.multiple_of(first_output + of_group * OUTPUTS, OUTPUTS)
                            plgpu.copy_gmem_to_smem(
                                weights_ref.at[expert, part, pl.ds(output, OUTPUTS), inputs],
                                staged_weights.at[stage * num_matrices + matrix],
                                full.at[stage],
                            )
                        plgpu.copy_gmem_to_smem(
                            rows_ref.at[of_tile, inputs],
                            staged_rows.at[stage],
                            full.at[stage],
                        )
                        return sent + 1

                    return lax.fori_loop(jnp.int32(0), steps, send, sent)

                sent = lax.fori_loop(jnp.int32(0), num_items, send_item, jnp.int32(0))

                def drain(i, _):
                    plgpu.barrier_wait(free.at[lax.rem(i, jnp.int32(num_stages))])

                lax.fori_loop(jnp.maximum(sent - num_stages, 0), sent, drain, None)

            def compute():
                plgpu.set_max_registers(_REGISTERS[num_groups][1], action="increase")

                def multiply(used, steps, *accumulators):
                    def add(step, _):
                        stage = lax.rem(used + step, jnp.int32(num_stages))
                        plgpu.barrier_wait(full.at[stage])
                        for part, accumulator in enumerate(accumulators):
                            matrix = stage * num_matrices + part * num_groups + group
                            plgpu.wgmma(
                                accumulator, staged_weights.at[matrix], staged_rows.at[stage].T
                            )
                        # This stage's products run on; those of the stage before are done.
                        plgpu.wgmma_wait(num_parts)

                        @pl.when(step > 0)
                        def _():
                            before = lax.rem(used + step - 1, jnp.int32(num_stages))
                            plgpu.barrier_arrive(free.at[before])

                    lax.fori_loop(jnp.int32(0), steps, add, None)
                    plgpu.wgmma_wait(0)
                    last = lax.rem(used + steps - 1, jnp.int32(num_stages))
                    plgpu.barrier_arrive(free.at[last])
                    return [accumulator[...] for accumulator in accumulators]

                def compute_item(i, used):
                    tile, first_output, expert, steps = read_item(i)
                    output = pl.multiple_of(first_output + group * OUTPUTS, OUTPUTS)

                    @pl.when(steps > 0)
                    def _():
                        accumulator = plgpu.WGMMAAccumulatorRef((OUTPUTS, tile_rows), jnp.float32)
                        products = pl.run_scoped(
                            lambda *refs: multiply(used, steps, *refs), *[accumulator] * num_parts
                        )
                        if bias_ref is not None:
                            for part, product in enumerate(products):
                                of_part = plgpu.load(  # pyright: ignore[reportCallIssue]
                                    bias_ref.at[expert, part, pl.ds(output, OUTPUTS)],
                                    layout=_PER_OUTPUT,
                                    optimized=False,
                                ).astype(jnp.float32)
                                products[part] = product + lax.broadcast_in_dim(
                                    of_part, product.shape, [0]
                                )
                        target = outputs.at[group]
                        for part, finished in enumerate(self.finish(products)):
                            finished = finished.astype(self.out_dtype)
                            for first in range(0, tile_rows, staged_out):
                                # What was stored last has left this memory.
                                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                                target.T[...] = plgpu.layout_cast(
                                    finished[:, first : first + staged_out],
                                    plgpu.Layout.WGMMA_TRANSPOSED,
                                )
                                plgpu.commit_smem()
                                row = pl.multiple_of(tile * tile_rows + first, staged_out)
                                plgpu.copy_smem_to_gmem(
                                    target,
                                    out_ref.at[
                                        pl.ds(row, staged_out), part, pl.ds(output, OUTPUTS)
                                    ],
                                )

                    return used + steps

                lax.fori_loop(jnp.int32(0), num_items, compute_item, jnp.int32(0))
                plgpu.wait_smem_to_gmem(0)

            pl.when(group < num_groups)(compute)
            pl.when(group == num_groups)(produce)

        operand = smem_transforms((8, INPUTS), 128)
        scratch: dict[str, Any] = dict(
            staged_rows=plgpu.SMEM((num_stages, tile_rows, INPUTS), rows.dtype, transforms=operand),
            staged_weights=plgpu.SMEM(
                (num_stages * num_matrices, OUTPUTS, INPUTS), rows.dtype, transforms=operand
            ),
            outputs=plgpu.SMEM(
                (num_groups, staged_out, OUTPUTS),
                self.out_dtype,
                transforms=smem_transforms((8, 128 // jnp.dtype(self.out_dtype).itemsize), 128),
            ),
            full=plgpu.Barrier(num_arrivals=num_matrices + 1, num_barriers=num_stages),
            free=plgpu.Barrier(num_arrivals=num_groups, num_barriers=num_stages),
        )
        shape = (experts.shape[0] * tile_rows, self.num_finished, num_outputs)
        return plgpu.kernel(
            kernel,
            out_type=jax.ShapeDtypeStruct(shape, self.out_dtype),
            grid=(self.num_workers,),
            grid_names=("worker",),
            num_threads=num_groups + 1,
            thread_name="warpgroup",
            scratch_types=scratch,
            compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
            interpret=self.interpret,
            kernel_name=self.name,
        )(rows, weights, bias, experts, ends)

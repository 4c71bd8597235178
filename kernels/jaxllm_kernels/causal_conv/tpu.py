"""The convolution on TPUs: XLA computes, and kernels copy the states of the rows."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.causal_conv.api import Activation
from jaxllm_kernels.causal_conv.xla import convolve
from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.recurrent.tpu_blocks import check_slots, chip_named, interpreter


@dataclass(frozen=True, kw_only=True)
class TpuConv:
    """`api.ConvOp` on TPUs.

    XLA cannot partition a Pallas call: with several devices, call it within a shard_map.
    """

    # The chip to compile for, or to emulate.
    chip: str
    name: str = "tpu"
    # Emulate the kernels on a CPU, with a race detector.
    interpret: bool = False

    def check(self, num_channels: int) -> None:
        """Raise ValueError if the kernels do not copy states of so many channels of a device."""
        check_slots(1, num_channels)

    def num_inputs(self, width: int) -> int:
        # So that they fill tiles.
        return 1 << (width - 2).bit_length() if width > 2 else width - 1

    def __call__(
        self,
        x: jax.Array,
        weight: jax.Array,
        bias: jax.Array | None,
        state: jax.Array,
        rows: StateRows,
        *,
        activation: Activation | None,
    ) -> tuple[jax.Array, jax.Array]:
        # Importing Pallas takes long, and other platforms do not need it.
        from jaxllm_kernels.recurrent.tpu_slots import read_slots, write_slots

        emulated = interpreter(chip_named(self.chip), self.interpret)
        before = read_slots(state, rows.slots, after=x, interpret=emulated)
        # What is read of rows without a slot is anything.
        starts_empty = rows.begins | (rows.slots >= len(state))
        before = jnp.where(starts_empty[:, None, None], 0, before)
        y, last = convolve(x, weight, bias, before, rows, activation=activation)
        return y, write_slots(state, rows.slots, last, interpret=emulated)

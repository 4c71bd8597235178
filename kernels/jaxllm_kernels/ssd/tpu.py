"""The state space of Mamba2 on TPUs: decodes by a Pallas kernel, drafts and tiles by XLA."""

import functools
from dataclasses import dataclass

import jax

from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.recurrent.tpu_blocks import LANES, SUBLANES, chip_named, interpreter
from jaxllm_kernels.ssd.xla import XlaSsd


@dataclass(frozen=True, kw_only=True)
class TpuSsd:
    """`api.SsdOp` on TPUs.

    XLA cannot partition a Pallas call: with several devices, call it within a shard_map.
    """

    # The chip to compile for, or to emulate.
    chip: str
    name: str = "tpu"
    # Bytes of a block of states in place of the usual number; tests make it small.
    block_bytes: int | None = None
    # Emulate the kernel on a CPU, with a race detector.
    interpret: bool = False

    def check(self, head_size: int, state_size: int) -> None:
        """Raise ValueError if the kernel does not compute heads of these sizes."""
        if not chip_named(self.chip).vmem_bytes:
            raise ValueError(f"the chip {self.chip!r} is not known")
        if head_size % SUBLANES or LANES % head_size:
            raise ValueError(f"heads of {head_size} are not 8, 16, 32, 64 or 128")
        if state_size % LANES:
            raise ValueError(f"states of {state_size} are no multiples of {LANES}")

    def __call__(
        self,
        x: jax.Array,
        b: jax.Array,
        c: jax.Array,
        step: jax.Array,
        rate: jax.Array,
        state: jax.Array,
        rows: StateRows,
    ) -> tuple[jax.Array, jax.Array]:
        # Importing Pallas takes long, and other platforms do not need it.
        from jaxllm_kernels.ssd.tpu_decode import run_decodes

        chip = chip_named(self.chip)
        decodes = functools.partial(
            run_decodes,
            chip=chip,
            block_bytes=self.block_bytes,
            interpret=interpreter(chip, self.interpret),
        )
        by_xla = XlaSsd().tuned_for(chip)
        return by_xla(x, b, c, step, rate, state, rows, decodes=decodes)

"""The state space of Mamba2 on Hopper GPUs: decodes by a Mosaic kernel, drafts and tiles by XLA."""

import functools
from dataclasses import dataclass

import jax

from jaxllm_kernels.compat import gpu_interpret_params
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.gpu_parts import check_chip, rows_of_part
from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.ssd.xla import XlaSsd


@dataclass(frozen=True, kw_only=True)
class MosaicSsd:
    """`api.SsdOp` on Hopper GPUs.

    It is for one device. Over two, the compiler of JAX 0.11.2 crashes on this kernel, within a
    shard_map.
    """

    by_xla: XlaSsd  # what computes the other rows
    name: str = "mosaic_sm90"
    # Emulate the kernel on a CPU, with a race detector.
    interpret: bool = False

    @classmethod
    def tuned_for(cls, chip: Chip) -> "MosaicSsd":
        """The op for a chip; raises ValueError if the kernel does not run on it."""
        check_chip(chip)
        return cls(by_xla=XlaSsd().tuned_for(chip))

    def check(self, head_size: int, state_size: int) -> None:
        """Raise ValueError if the kernel does not compute heads of these sizes."""
        rows_of_part(head_size, state_size)

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
        # Importing Mosaic takes long, and not every JAX has it.
        from jaxllm_kernels.ssd.gpu_decode import run_decodes

        interpret = gpu_interpret_params() if self.interpret else False
        decodes = functools.partial(run_decodes, interpret=interpret)
        return self.by_xla(x, b, c, step, rate, state, rows, decodes=decodes)

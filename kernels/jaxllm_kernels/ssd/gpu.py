"""The state space of Mamba2 on Hopper GPUs: a Mosaic kernel for decodes, one for all other rows."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.compat import gpu_interpret_params
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.gpu_parts import (
    BLOCKS_OF_CORE,
    check_chip,
    rows_in_turn,
    rows_of_part,
)
from jaxllm_kernels.recurrent.rows import StateRows


@dataclass(frozen=True, kw_only=True)
class MosaicSsd:
    """`api.SsdOp` on Hopper GPUs.

    XLA cannot partition a Pallas call: with several devices, call it within a shard_map.
    """

    name: str = "mosaic_sm90"
    # Thread blocks of the kernel for rows of several tokens.
    num_workers: int = 132 * BLOCKS_OF_CORE
    # Emulate the kernels on a CPU, with a race detector.
    interpret: bool = False

    @classmethod
    def tuned_for(cls, chip: Chip) -> "MosaicSsd":
        """The op for a chip; raises ValueError if the kernels do not run on it."""
        check_chip(chip)
        return cls(num_workers=chip.num_cores * BLOCKS_OF_CORE)

    def check(self, head_size: int, state_size: int) -> None:
        """Raise ValueError if the kernels do not compute heads of these sizes."""
        rows_of_part(head_size, state_size)
        rows_in_turn(head_size, state_size)

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
        from jaxllm_kernels.ssd.gpu_rows import run_rows

        interpret = gpu_interpret_params() if self.interpret else False
        operands = x, b, c, step, step * rate
        out, state = run_decodes(operands, state, rows, interpret=interpret)
        out = jnp.pad(out, ((0, len(x) - len(out)), (0, 0), (0, 0)))
        if rows.tiles is None and rows.drafts is None:
            return out, state
        return run_rows(
            operands, out, state, rows, num_workers=self.num_workers, interpret=interpret
        )

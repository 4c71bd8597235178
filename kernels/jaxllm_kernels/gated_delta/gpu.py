"""The gated delta rule on Hopper GPUs: a Mosaic kernel for decodes, one for all other rows."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxllm_kernels.compat import gpu_interpret_params
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.gpu_parts import (
    BLOCKS_OF_CORE,
    check_chip,
    columns_in_turn,
    columns_of_part,
)
from jaxllm_kernels.recurrent.rows import StateRows


@dataclass(frozen=True, kw_only=True)
class MosaicDelta:
    """`api.DeltaOp` on Hopper GPUs.

    XLA cannot partition a Pallas call: with several devices, call it within a shard_map.
    """

    name: str = "mosaic_sm90"
    # Thread blocks of the kernel for rows of several tokens.
    num_workers: int = 132 * BLOCKS_OF_CORE
    # Emulate the kernels on a CPU, with a race detector.
    interpret: bool = False

    @classmethod
    def tuned_for(cls, chip: Chip) -> "MosaicDelta":
        """The op for a chip; raises ValueError if the kernels do not run on it."""
        check_chip(chip)
        return cls(num_workers=chip.num_cores * BLOCKS_OF_CORE)

    def check(self, key_size: int, value_size: int) -> None:
        """Raise ValueError if the kernels do not compute heads of these sizes."""
        columns_of_part(key_size, value_size)
        columns_in_turn(key_size, value_size)

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array,
        beta: jax.Array,
        state: jax.Array,
        rows: StateRows,
    ) -> tuple[jax.Array, jax.Array]:
        # Importing Mosaic takes long, and not every JAX has it.
        from jaxllm_kernels.gated_delta.gpu_decode import run_decodes
        from jaxllm_kernels.gated_delta.gpu_rows import run_rows

        interpret = gpu_interpret_params() if self.interpret else False
        operands = q, k, v, log_decay, beta
        out, state = run_decodes(operands, state, rows, interpret=interpret)
        out = jnp.pad(out, ((0, len(v) - len(out)), (0, 0), (0, 0)))
        if rows.tiles is None and rows.drafts is None:
            return out, state
        return run_rows(
            operands, out, state, rows, num_workers=self.num_workers, interpret=interpret
        )

"""The gated delta rule on Hopper GPUs: decodes by a Mosaic kernel, drafts and tiles by XLA."""

import functools
from dataclasses import dataclass

import jax

from jaxllm_kernels.compat import gpu_interpret_params
from jaxllm_kernels.gated_delta.xla import XlaDelta
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.gpu_parts import check_chip, columns_of_part
from jaxllm_kernels.recurrent.rows import StateRows


@dataclass(frozen=True, kw_only=True)
class MosaicDelta:
    """`api.DeltaOp` on Hopper GPUs.

    It is for one device. Over two, the compiler of JAX 0.11.2 crashes on the kernel for the delta
    rule, within a shard_map.
    """

    by_xla: XlaDelta  # what computes the other rows
    name: str = "mosaic_sm90"
    # Emulate the kernel on a CPU, with a race detector.
    interpret: bool = False

    @classmethod
    def tuned_for(cls, chip: Chip) -> "MosaicDelta":
        """The op for a chip; raises ValueError if the kernel does not run on it."""
        check_chip(chip)
        return cls(by_xla=XlaDelta().tuned_for(chip))

    def check(self, key_size: int, value_size: int) -> None:
        """Raise ValueError if the kernel does not compute heads of these sizes."""
        columns_of_part(key_size, value_size)

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

        interpret = gpu_interpret_params() if self.interpret else False
        decodes = functools.partial(run_decodes, interpret=interpret)
        return self.by_xla(q, k, v, log_decay, beta, state, rows, decodes=decodes)

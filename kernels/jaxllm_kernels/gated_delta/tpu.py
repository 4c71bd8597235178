"""The gated delta rule on TPUs: decodes and tiles by Pallas kernels, drafts by XLA.

Tiles are XLA's, too, where heads are not of 128 x 128, where all heads of a device do not fit into
VMEM, and on chips of two cores.
"""

import functools
from dataclasses import dataclass

import jax

from jaxllm_kernels.gated_delta.xla import XlaDelta
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.recurrent.tpu_blocks import check_blocks, chip_named, interpreter


@dataclass(frozen=True, kw_only=True)
class TpuDelta:
    """`api.DeltaOp` on TPUs.

    XLA cannot partition a Pallas call: with several devices, call it within a shard_map.
    """

    # The chip to compile for, or to emulate.
    chip: str
    name: str = "tpu"
    # Bytes of a block of states in place of the usual number; tests make it small.
    block_bytes: int | None = None
    # Emulate the kernels on a CPU, with a race detector.
    interpret: bool = False

    def check(self, num_key_heads: int, num_heads: int, key_size: int, value_size: int) -> None:
        """Raise ValueError if the kernel does not compute such heads, as on one device."""
        check_blocks(self._chip, num_heads // num_key_heads, (key_size, value_size))

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
        # Importing Pallas takes long, and other platforms do not need it.
        from jaxllm_kernels.gated_delta.tpu_decode import run_decodes
        from jaxllm_kernels.gated_delta.tpu_tiles import fits, run_delta_tiles

        interpret = interpreter(self._chip, self.interpret)
        decodes = functools.partial(
            run_decodes,
            chip=self._chip,
            block_bytes=self.block_bytes,
            interpret=interpret,
        )
        tiles = functools.partial(run_delta_tiles, interpret=interpret)
        if not fits(
            self._chip,
            q.shape[1],
            v.shape[1],
            (state.shape[2], state.shape[3]),
            log_decay.ndim == 3,
        ):
            tiles = None
        by_xla = XlaDelta().tuned_for(self._chip)
        return by_xla(q, k, v, log_decay, beta, state, rows, decodes=decodes, tiles=tiles)

    @property
    def _chip(self) -> Chip:
        return chip_named(self.chip)

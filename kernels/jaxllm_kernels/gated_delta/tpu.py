"""The gated delta rule on TPUs: decodes and tiles by Pallas kernels, drafts by XLA."""

import functools
from dataclasses import dataclass

import jax

from jaxllm_kernels.gated_delta.xla import XlaDelta
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.recurrent.tpu_blocks import (
    LANES,
    check_blocks,
    check_tiles,
    chip_named,
    interpreter,
)

# Heads of one key are computed side by side. What is computed of more may not fit into VMEM.
_MOST_OF_A_KEY = 5


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
    # Whether the kernel computes tiles; otherwise XLA does.
    with_tiles: bool = True
    # Emulate the kernels on a CPU, with a race detector.
    interpret: bool = False

    def check(self, num_key_heads: int, num_heads: int, key_size: int, value_size: int) -> None:
        """Raise ValueError if the kernel does not compute such heads, as on one device."""
        check_blocks(self._chip, num_heads // num_key_heads, (key_size, value_size))

    def check_tiles(
        self,
        num_key_heads: int,
        num_heads: int,
        key_size: int,
        value_size: int,
        *,
        by_channel: bool,
    ) -> None:
        """Raise ValueError if the kernel does not compute tiles of such heads, as on one device."""
        if (key_size, value_size) != (LANES, LANES):
            # A token's numbers of a head fill one register's lanes: wider rows cannot be loaded
            # with a stride.
            raise ValueError(f"states of {key_size} x {value_size} are not {LANES} x {LANES}")
        if num_heads > LANES or num_heads // num_key_heads > _MOST_OF_A_KEY:
            raise ValueError(
                f"{num_heads} heads, {num_heads // num_key_heads} of a key, are more than {LANES} "
                f"and {_MOST_OF_A_KEY}"
            )
        operands = [(num_key_heads, key_size)] * 2 + [(num_heads, value_size), (1, LANES)]
        operands += [(num_heads, key_size)] if by_channel else []
        out, state = (num_heads, value_size), (num_heads, key_size, value_size)
        check_tiles(self._chip, operands, out, state)

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
        from jaxllm_kernels.gated_delta.tpu_tiles import run_delta_tiles

        interpret = interpreter(self._chip, self.interpret)
        decodes = functools.partial(
            run_decodes,
            chip=self._chip,
            block_bytes=self.block_bytes,
            interpret=interpret,
        )
        tiles = functools.partial(run_delta_tiles, interpret=interpret)
        if not self.with_tiles:
            tiles = None
        by_xla = XlaDelta().tuned_for(self._chip)
        return by_xla(q, k, v, log_decay, beta, state, rows, decodes=decodes, tiles=tiles)

    @property
    def _chip(self) -> Chip:
        return chip_named(self.chip)

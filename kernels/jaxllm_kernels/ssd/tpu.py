"""The state space of Mamba2 on TPUs: decodes and tiles by Pallas kernels, drafts by XLA."""

import functools
from dataclasses import dataclass

import jax

from jaxllm_kernels.recurrent.rows import StateRows
from jaxllm_kernels.recurrent.tpu_blocks import (
    LANES,
    SUBLANES,
    check_tiles,
    chip_named,
    interpreter,
)
from jaxllm_kernels.ssd.xla import XlaSsd

# The sizes of heads and of states for which the kernel computes tiles.
_TILE_HEAD_SIZES, _TILE_STATE_SIZES = (64, 128), (128, 256)


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
    # Whether the kernel computes tiles; otherwise XLA does.
    with_tiles: bool = True
    # Emulate the kernels on a CPU, with a race detector.
    interpret: bool = False

    def check(self, head_size: int, state_size: int) -> None:
        """Raise ValueError if the kernel does not compute heads of these sizes."""
        if not chip_named(self.chip).vmem_bytes:
            raise ValueError(f"the chip {self.chip!r} is not known")
        if head_size % SUBLANES or LANES % head_size:
            raise ValueError(f"heads of {head_size} are not 8, 16, 32, 64 or 128")
        if state_size % LANES:
            raise ValueError(f"states of {state_size} are no multiples of {LANES}")

    def check_tiles(self, num_groups: int, num_heads: int, head_size: int, state_size: int) -> None:
        """Raise ValueError if the kernel does not compute tiles of such heads, as on one device."""
        heads_of_group = num_heads // num_groups
        if head_size not in _TILE_HEAD_SIZES or state_size not in _TILE_STATE_SIZES:
            raise ValueError(
                f"states of {head_size} x {state_size} are not "
                f"{_any_of(_TILE_HEAD_SIZES)} x {_any_of(_TILE_STATE_SIZES)}"
            )
        if num_heads > LANES:
            raise ValueError(f"{num_heads} heads are more than {LANES}")
        if heads_of_group % 2:
            raise ValueError(f"heads of a group: {heads_of_group}, which is odd")
        # Operands and outputs fill lanes: x, b, c, and the numbers of heads.
        inputs = num_heads * head_size // LANES, LANES
        between = num_groups * state_size // LANES, LANES
        operands = [inputs, between, between, (SUBLANES, LANES)]
        check_tiles(chip_named(self.chip), operands, inputs, (num_heads, head_size, state_size))

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
        from jaxllm_kernels.ssd.tpu_tiles import run_ssd_tiles

        chip = chip_named(self.chip)
        interpret = interpreter(chip, self.interpret)
        decodes = functools.partial(
            run_decodes,
            chip=chip,
            block_bytes=self.block_bytes,
            interpret=interpret,
        )
        by_xla = XlaSsd().tuned_for(chip)
        if rows.tiles is None or not self.with_tiles:
            return by_xla(x, b, c, step, rate, state, rows, decodes=decodes)
        return by_xla(
            x,
            b,
            c,
            step,
            rate,
            state,
            rows,
            decodes=decodes,
            tiles=functools.partial(run_ssd_tiles, interpret=interpret),
            # XLA pads rows that fill no lanes.
            out_shape=(x.shape[1] * x.shape[2] // LANES, LANES),
        )


def _any_of(sizes: tuple[int, ...]) -> str:
    return " or ".join(map(str, sizes))

"""How the kernels for TPUs cut the states of a step into blocks, and which block each row has.

A block is some heads of a slot's state. While a kernel computes one block, the next one is loaded
and the last one is written, so a state is read once and written once.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm_kernels.platform import CHIPS, Chip
from jaxllm_kernels.recurrent.rows import TILE, StateRows

LANES = 128
SUBLANES = 8
# Of this many bytes a copy takes longer than a step of a grid costs beside it.
_BLOCK_BYTES = 1 << 20
# Blocks in memory: two that are read, and two that are written.
_BLOCKS_HELD = 4

# What a kernel does with a row.
SKIP, GO_ON, BEGIN = 0, 1, 2


def chip_named(name: str) -> Chip:
    """A chip to compile for, or to emulate."""
    return CHIPS.get(name, Chip(name=name, platform="tpu"))


def interpreter(chip: Chip, interpret: bool) -> Any:
    """What emulates a kernel on a CPU, with a race detector; False if none does."""
    if not interpret:
        return False
    # Importing Pallas takes long, and other platforms do not need it.
    from jax.experimental.pallas import tpu as pltpu

    # A copy is done when it starts: a missing wait is a race, which is found.
    return pltpu.InterpretParams(
        detect_races=True, dma_execution_mode="eager", num_cores_or_threads=chip.num_cores
    )


def check_slots(rows: int, columns: int) -> None:
    """Raise ValueError unless states, which end with these axes, fill tiles. In others XLA has
    slots where a tile has rows, so that the state of a slot is not in one place in memory."""
    if columns % LANES or (rows % SUBLANES and rows & (rows - 1)):
        raise ValueError(f"states of {rows} x {columns} fill no tiles")


def check_blocks(chip: Chip, heads_together: int, sizes: tuple[int, int]) -> None:
    """Raise ValueError unless a kernel can take states of these sizes, so many heads together."""
    if not chip.vmem_bytes:
        raise ValueError(f"the chip {chip.name!r} is not known")
    if any(size % LANES for size in sizes):
        raise ValueError(f"states of {sizes[0]} x {sizes[1]} are no multiples of {LANES}")
    num_bytes = _BLOCKS_HELD * heads_together * 4 * math.prod(sizes)
    if num_bytes > chip.vmem_bytes // 2:
        raise ValueError(f"{_BLOCKS_HELD} blocks of {heads_together} heads do not fit into VMEM")


def check_tiles(
    chip: Chip, operands: Sequence[Sequence[int]], out: Sequence[int], state: Sequence[int]
) -> None:
    """Raise ValueError unless a kernel for tiles can hold these (`vmem_of_tiles`) on a chip."""
    if chip.num_cores > 1:
        raise ValueError(f"the kernel takes one core, and {chip.name} has {chip.num_cores}")
    needed = vmem_of_tiles(operands, out, state)
    # The other half is for what is computed.
    if needed > chip.vmem_bytes // 2:
        raise ValueError(
            f"{state[0]} heads take {needed} bytes of VMEM, and there are "
            f"{chip.vmem_bytes // 2} for them"
        )


def vmem_of_tiles(
    operands: Sequence[Sequence[int]], out: Sequence[int], state: Sequence[int]
) -> int:
    """The bytes that tiles hold: operands and outputs, of which a token has heads and sizes, and
    the state of a row."""

    def of_window(num_heads: int, size: int) -> int:
        return 4 * TILE * size * -(-num_heads // SUBLANES) * SUBLANES

    # Windows of the next tile are loaded while a tile is computed.
    loaded = 2 * sum(of_window(*operand) for operand in operands)
    return loaded + of_window(*out) + 4 * math.prod(state)


def heads_of_block(
    num_heads: int,
    heads_together: int,
    state_bytes: int,
    chip: Chip,
    block_bytes: int | None,
    *,
    cuts: bool = False,
) -> int:
    """How many heads a block has: as many as fit, and no more than give each core a block.

    Args:
      heads_together: so many, or a multiple of it.
      state_bytes: those of a head.
      block_bytes: those of a block at most; None: the usual number.
      cuts: whether several blocks can have equal parts of what else is together.
    """
    fewest = 1 if cuts else heads_together
    most = max(block_bytes or _BLOCK_BYTES, fewest * state_bytes) // state_bytes
    fitting = [
        count
        for count in range(fewest, min(most, num_heads) + 1)
        if num_heads % count == 0
        and (count % heads_together == 0 or (cuts and heads_together % count == 0))
    ]
    for_cores = [count for count in fitting if num_heads // count >= chip.num_cores]
    return max(for_cores or fitting)


class RowBlocks(NamedTuple):
    """What a kernel knows of its rows, in scalar memory."""

    slots: jax.Array  # int32 [R]
    what: jax.Array  # int32 [R]: SKIP, GO_ON or BEGIN
    num_rows: jax.Array  # int32 []: the rows that it takes, at least one


def rows_of_decodes(rows: StateRows, num_rows: int, num_slots: int) -> RowBlocks:
    """The first rows of a step, of which the decodes are to be computed.

    A row that is skipped has the slot of the row before it. So its block is in memory already and
    stays there, and no stale copy of it is written. Skipped rows at the begin have the first slot
    that any row has; the first of them must copy its block.
    """
    places = jnp.arange(num_rows, dtype=jnp.int32)
    slots = rows.slots[:num_rows]
    runs = (places < rows.num_decodes) & (slots >= 0) & (slots < num_slots)
    last = lax.cummax(jnp.where(runs, places, -1))
    first = jnp.argmax(runs).astype(jnp.int32)
    own = slots[jnp.where(last >= 0, last, first)]
    what = jnp.where(rows.begins[:num_rows], BEGIN, GO_ON)
    return RowBlocks(
        slots=jnp.clip(own, 0, num_slots - 1),
        what=jnp.where(runs, what, SKIP),
        num_rows=jnp.maximum(rows.num_decodes, 1),
    )

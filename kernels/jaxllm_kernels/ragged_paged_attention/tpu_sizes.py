"""How the TPU kernel cuts its work: block sizes, and the on-chip memory that they take."""

import math
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.common import cdiv, round_up
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import AttentionConfig, BatchLimits

# Lanes of a vector register: the minor dimension of every array comes in multiples of them.
LANES = 128

_MIB = 1 << 20


def sublane_tile(dtype: DTypeLike) -> int:
    """Rows of the smallest piece of an array that can be moved or stored by itself."""
    return 32 // jnp.dtype(dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Where the key and the value of a token and kv head lie in their row of the cache.

    They are side by side. Where both fit into one register's lanes they share them: queries have
    zeros where the value is, and outputs are cut from there. Otherwise each is padded to whole
    registers by itself.
    """

    # Of a query, and of what keys and values are multiplied as.
    lanes: int
    # Of the row.
    width: int
    # First lane of the value in the row, and of the output in the `lanes`.
    value_start: int
    out_start: int

    @property
    def is_shared(self) -> bool:
        """Whether key and value lie in the same lanes."""
        return self.width == self.lanes


def token_layout(head_size: int) -> TokenLayout:
    """The layout for a head size."""
    if 2 * head_size <= LANES:
        return TokenLayout(lanes=LANES, width=LANES, value_start=head_size, out_start=head_size)
    lanes = round_up(head_size, LANES)
    return TokenLayout(lanes=lanes, width=2 * lanes, value_start=lanes, out_start=0)


@dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """How a kernel cuts its work."""

    # Decodes: a segment is one token, and a step has several. Otherwise a step is a tile of
    # consecutive tokens, and each row with tokens in it has a segment.
    for_decodes: bool
    # Tokens of a step.
    step_tokens: int
    # Pages that are fetched into a slot, and that are computed at once.
    slot_pages: int
    chunk_pages: int
    num_slots: int
    # Kv heads that are computed at once.
    batch_heads: int
    # Parts into which the kv heads are split, each a sequence of steps of its own.
    head_groups: int
    # On-chip memory that the compiler may take for it.
    vmem_limit_bytes: int = 0

    def lines(self, group_size: int) -> int:
        """Query lines of a segment and kv head."""
        return group_size if self.for_decodes else group_size * self.step_tokens

    def vmem_bytes(
        self,
        config: AttentionConfig,
        *,
        block_size: int,
        dtype: DTypeLike,
    ) -> int:
        """On-chip memory of a core that a kernel for queries of that dtype takes, at most."""
        dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(config.kv_dtype or dtype)
        heads = config.num_kv_heads // self.head_groups
        group_size = config.num_heads // config.num_kv_heads
        layout = token_layout(config.head_size)
        slot_tokens, chunk_tokens = self.slot_pages * block_size, self.chunk_pages * block_size
        lines = self.lines(group_size)

        slots = self.num_slots * _padded_bytes((heads, slot_tokens, layout.width), kv_dtype)
        written = _padded_bytes((2 * heads, sublane_tile(kv_dtype), layout.width), kv_dtype)
        softmax = _padded_bytes((heads, lines, 2 * LANES + layout.lanes), jnp.float32)
        if self.for_decodes:
            q = _padded_bytes((self.step_tokens, heads, group_size, layout.lanes), dtype)
            new = _padded_bytes((self.step_tokens, heads, layout.width), dtype)
        else:
            q = _padded_bytes((heads, group_size, self.step_tokens, layout.lanes), dtype)
            new = _padded_bytes((heads, self.step_tokens, layout.width), dtype)
        per_head = _padded_bytes((heads, group_size + 1, LANES), jnp.float32)
        # What moves between steps is there twice. The rest is intermediate results: scores and
        # what becomes of them, and keys and values in the type that they are multiplied in.
        scores = _padded_bytes((self.batch_heads, lines, chunk_tokens), jnp.float32)
        chunk = _padded_bytes((self.batch_heads, chunk_tokens, layout.width), jnp.float32)
        intermediate = 5 * scores + 3 * chunk + _VMEM_RESERVE
        return slots + written + softmax + 2 * (2 * q + new + per_head) + intermediate


# On-chip memory that the compiler takes for itself, rounded up.
_VMEM_RESERVE = _MIB // 2


def _padded_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes of an array whose last two dimensions come in whole tiles."""
    *major, rows, lanes = shape
    tile = round_up(rows, sublane_tile(dtype)) * round_up(lanes, LANES)
    return math.prod(major) * tile * jnp.dtype(dtype).itemsize


def smem_bytes(limits: BatchLimits) -> int:
    """Scalar memory that a kernel takes: block tables, and four numbers of each segment."""
    num_tiles = cdiv(limits.num_tokens, _MIN_TILE_TOKENS)
    segments = limits.num_rows + num_tiles
    return 4 * (limits.num_rows * limits.max_blocks + 4 * segments + num_tiles) + _SMEM_RESERVE


# Scalar memory that the compiler and the pipeline of blocks take for themselves, rounded up.
_SMEM_RESERVE = 16 * 1024


def choose_sizes(
    config: AttentionConfig,
    *,
    for_decodes: bool,
    num_tokens: int,
    max_blocks: int,
    block_size: int,
    dtype: DTypeLike,
    chip: Chip,
) -> KernelSizes:
    """Sizes by formula: large enough to keep memory busy, small enough to fit."""
    for head_groups in _head_groups(config.num_kv_heads, chip.num_cores):
        for shrink in (1, 2, 4, 8):
            sizes = _sizes(
                config,
                for_decodes=for_decodes,
                num_tokens=num_tokens,
                max_blocks=max_blocks,
                block_size=block_size,
                dtype=dtype,
                chip=chip,
                head_groups=head_groups,
                shrink=shrink,
            )
            taken = sizes.vmem_bytes(config, block_size=block_size, dtype=dtype)
            if taken <= vmem_budget(chip):
                return replace(sizes, vmem_limit_bytes=taken)
    raise ValueError(
        f"attention with head_size={config.head_size}, {config.num_heads} query heads and "
        f"{config.num_kv_heads} kv heads in blocks of {block_size} tokens takes "
        f"{taken / _MIB:.0f} MiB of on-chip memory, of which a {chip.name} gives "
        f"{vmem_budget(chip) / _MIB:.0f}; lower --block-size"
    )


def vmem_budget(chip: Chip) -> int:
    """What a kernel may take: three quarters of a core's memory, but leave XLA most of a large one,
    which it fills with the next layer's weights."""
    return min(chip.vmem_bytes * 3 // 4, 32 * _MIB)


# A fetch should outlast its own latency: this long at the rate of the chip's memory, per slot.
_SLOT_SECONDS = 0.5e-6
# Of decodes. All but one slot are on their way while one is computed.
_DECODE_SLOTS = 4
# Tokens of a decode's context that are computed at once.
_DECODE_CHUNK_TOKENS = 256
# Of decodes, queries and outputs that travel together.
_DECODE_STEP_TOKENS = 32
# Query lines (tokens x heads of a group) and keys that meet in one matrix product of a prefill.
_PREFILL_LINES = 512
_PREFILL_KEYS = 512
# Tiles of prefill chunks start where an array of 16 bits can be cut.
_MIN_TILE_TOKENS = 16
_MAX_TILE_TOKENS = 256
# Kv heads whose products of few lines are issued together, to hide the latency of each.
_BATCH_HEADS = 8


def _sizes(
    config: AttentionConfig,
    *,
    for_decodes: bool,
    num_tokens: int,
    max_blocks: int,
    block_size: int,
    dtype: DTypeLike,
    chip: Chip,
    head_groups: int,
    shrink: int,
) -> KernelSizes:
    """What one would like for so many groups of heads, made `shrink` times smaller."""
    heads = config.num_kv_heads // head_groups
    if for_decodes:
        kv_dtype = jnp.dtype(config.kv_dtype or dtype)
        token_bytes = heads * token_layout(config.head_size).width * kv_dtype.itemsize
        wanted = int(chip.hbm_bytes_per_second * _SLOT_SECONDS / token_bytes)
        chunk_tokens = _DECODE_CHUNK_TOKENS
        slot_tokens = max(wanted, chunk_tokens)
        batch_heads = next(n for n in range(min(heads, _BATCH_HEADS), 0, -1) if heads % n == 0)
    else:
        chunk_tokens = slot_tokens = _PREFILL_KEYS
        batch_heads = 1
    chunk_pages = max(min(chunk_tokens // shrink // block_size, max_blocks), 1)
    slot_pages = max(min(slot_tokens // shrink // block_size, max_blocks), 1)
    return KernelSizes(
        for_decodes=for_decodes,
        step_tokens=step_tokens(config, for_decodes=for_decodes, num_tokens=num_tokens),
        slot_pages=cdiv(slot_pages, chunk_pages) * chunk_pages,
        chunk_pages=chunk_pages,
        num_slots=_DECODE_SLOTS if for_decodes else 2,
        batch_heads=batch_heads,
        head_groups=head_groups,
    )


def step_tokens(config: AttentionConfig, *, for_decodes: bool, num_tokens: int) -> int:
    """Tokens of a step: the only one of the sizes that the lists of work depend on."""
    if for_decodes:
        return min(_DECODE_STEP_TOKENS, num_tokens)
    group_size = config.num_heads // config.num_kv_heads
    size = min(_floor_power_of_two(_PREFILL_LINES // group_size), _ceil_power_of_two(num_tokens))
    return min(max(size, _MIN_TILE_TOKENS), _MAX_TILE_TOKENS)


def _head_groups(num_kv_heads: int, num_cores: int) -> list[int]:
    """Ways to split kv heads evenly, fewest first, but enough for every core if there are any."""
    divisors = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0]
    return [n for n in divisors if n % num_cores == 0] or divisors


def _floor_power_of_two(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def _ceil_power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()

"""Sizes of the TPU kernel's blocks, and the on-chip memory that they take."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.common import cdiv, round_up
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.api import SHORT_ROW, AttentionConfig, BatchLimits
from jaxllm_kernels.ragged_paged_attention.tpu_layout import (
    LANES,
    SUBLANES,
    TokenLayout,
    sublane_tile,
    token_layout,
)

_MIB = 1 << 20

# The kernels: for the decodes of a decode_only step; for the decodes and short rows of another; for
# its other rows.
Kind = Literal["decode", "short", "prefill"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """The sizes into which a kernel cuts its work."""

    layout: TokenLayout
    # A step of a prefill is a tile of consecutive tokens, with a segment for each row in it.
    # Decodes and short rows are not cut: a step has those that begin in it.
    kind: Kind
    # The most tokens of a call; tokens of a step; and the most tokens of a segment.
    num_tokens: int
    step_tokens: int
    segment_tokens: int
    # Pages that are fetched into a slot, and pages that are computed together.
    slot_pages: int
    chunk_pages: int
    num_slots: int
    # Of a decode's or short row's chunk; the products of pieces overlap.
    piece_pages: int
    # Kv heads that are computed together; of short rows, which have more query lines.
    batch_heads: int
    short_batch_heads: int
    # The query lines of a kv head that are computed together; of short rows.
    batch_lines: int
    short_batch_lines: int
    # The kv heads are split into head groups. The steps of decodes are dealt to row groups in turn.
    # Each combination of both is a separate sequence of steps.
    head_groups: int
    row_groups: int = 1
    # A prefill takes the query heads of a kv head in so many parts.
    group_parts: int = 1
    # The compiler's limit of on-chip memory for the kernel.
    vmem_limit_bytes: int = 0

    @property
    def window_tokens(self) -> int:
        """Tokens of a step's operands: a short row may begin with the last token of a step."""
        return min(self.output_tokens, self.num_tokens)

    @property
    def output_tokens(self) -> int:
        """Tokens for which a step has room: short rows are computed as if they had the most."""
        return self.step_tokens + (self.segment_tokens - 1 if self.kind == "short" else 0)

    def window_start(self, step: jax.Array) -> jax.Array:
        """The first token of a step's operands, if there are short rows. The last windows end with
        the operands, which are not padded."""
        return jnp.minimum(step * self.step_tokens, self.num_tokens - self.window_tokens)

    def lines(self, group_size: int) -> int:
        """Query lines of a segment for a kv head; of a prefill, for a part of its query heads."""
        return group_size // self.group_parts * self.segment_tokens

    def vmem_bytes(
        self,
        config: AttentionConfig,
        *,
        block_size: int,
        dtype: DTypeLike,
    ) -> int:
        """An upper bound of a core's on-chip memory for a kernel with queries of that dtype."""
        dtype, kv_dtype = jnp.dtype(dtype), jnp.dtype(config.kv_dtype or dtype)
        heads = config.num_kv_heads // self.head_groups
        group_size = config.num_heads // config.num_kv_heads
        layout, parts = self.layout, self.group_parts
        slot_tokens, chunk_tokens = self.slot_pages * block_size, self.chunk_pages * block_size
        lines = self.lines(group_size)

        slots = self.num_slots * _padded_bytes((heads, slot_tokens, layout.width), kv_dtype)
        written = _padded_bytes((2 * heads, sublane_tile(kv_dtype), layout.width), kv_dtype)
        if self.kind != "prefill":
            # Short rows also have their queries there.
            lanes = 2 * LANES + layout.lanes + layout.value_lanes
            softmax = _padded_bytes((heads, lines, lanes), jnp.float32)
            q = _padded_bytes((self.output_tokens, heads, group_size, layout.lanes), dtype)
            new = _padded_bytes((self.window_tokens, heads, layout.width), dtype)
            sinks = _padded_bytes((heads, group_size, 1), jnp.float32)
        else:
            softmax = _padded_bytes(
                (heads * parts, 2 * SUBLANES + layout.value_lanes, lines), jnp.float32
            )
            q = _padded_bytes((heads, group_size, self.step_tokens, layout.lanes), dtype)
            new = _padded_bytes((heads, self.step_tokens, layout.width), dtype)
            sinks = _padded_bytes((heads * parts, 1, lines), jnp.float32)
        per_head = sinks + _padded_bytes((heads, 1, 2), jnp.float32)
        # Operands that move between steps are double-buffered. The rest is intermediate: scores
        # (which a prefill also keeps), their weights, and keys and values in the product's dtype.
        scores = max(
            _padded_bytes((self.batch_heads, self.batch_lines, chunk_tokens), jnp.float32),
            _padded_bytes(
                (self.short_batch_heads, self.short_batch_lines, chunk_tokens), jnp.float32
            ),
        )
        chunk = _padded_bytes((self.batch_heads, chunk_tokens, layout.width), jnp.float32)
        intermediate = (3 if self.kind == "prefill" else 5) * scores + 3 * chunk + _VMEM_RESERVE
        return slots + written + softmax + 2 * (2 * q + new + per_head) + intermediate


# On-chip memory that the compiler itself needs, rounded up.
_VMEM_RESERVE = _MIB // 2


def _padded_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes of an array whose last two dimensions are padded to whole tiles."""
    *major, rows, lanes = shape
    tile = round_up(rows, sublane_tile(dtype)) * round_up(lanes, LANES)
    return math.prod(major) * tile * jnp.dtype(dtype).itemsize


def smem_bytes(limits: BatchLimits) -> int:
    """Scalar memory of a kernel: block tables, and at most five numbers per segment."""
    num_tiles = cdiv(limits.num_tokens, MIN_TILE_TOKENS)
    segments = limits.num_rows + num_tiles
    return 4 * (limits.num_rows * limits.max_blocks + 5 * segments + num_tiles) + _SMEM_RESERVE


# Scalar memory that the compiler and the pipeline of blocks need, rounded up.
_SMEM_RESERVE = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The tunable parameters of a kernel: the fields of an entry of tuned/<chip>.json."""

    # Tokens of a step, keys that are fetched into a slot, and keys that are computed together. The
    # actual sizes limit each.
    step_tokens: int
    slot_tokens: int
    chunk_tokens: int
    # Two for prefills: a tile may not fetch before the previous tile has written.
    num_slots: int
    # Keys of a decode's or short row's chunk whose scores are computed at once, at most; None: all.
    piece_tokens: int | None = None
    # Kv heads (of a prefill also parts of their groups) that are computed together, at most; None:
    # as many as hide latencies with heads of up to 256.
    batch_heads: int | None = None


def default_tuning(config: AttentionConfig, chip: Chip, *, kind: Kind) -> Tuning:
    """A formula for cases without measurements."""
    kv_bytes = jnp.dtype(config.kv_dtype or jnp.bfloat16).itemsize
    token_bytes = config.num_kv_heads * token_layout(config.head_size).width * kv_bytes
    if kind != "prefill":
        # Fetching a slot takes as long as starting a fetch, and three slots are in flight.
        tokens_per_us = chip.hbm_bytes_per_second * 1e-6 / token_bytes
        return Tuning(
            step_tokens=16,
            slot_tokens=min(max(int(tokens_per_us / 2), 512), 2048),
            # What products and exponentials take to begin is shared by a chunk. Longer chunks have
            # more unseen keys, so they are for few heads beside a fast memory.
            chunk_tokens=512 if tokens_per_us < 5 * 512 else 1024,
            num_slots=4,
        )
    # Every tile reads its row's pages again. With 512 query lines (tokens x heads of a group) it
    # computes longer than that takes. A unit of 2^19 scores, in chunks as short as its heads allow,
    # hides latencies (compiled for v5e, v6e and v7x); longer chunks have more unseen keys. A tile
    # may not fetch while it writes, so long slots leave more to compute meanwhile.
    group_size = config.num_heads // config.num_kv_heads
    tile = max(min(power_of_two(_PREFILL_LINES // group_size), 256), MIN_TILE_TOKENS)
    heads = _batch_heads(config.num_kv_heads, _MAX_PREFILL_HEADS)
    return Tuning(
        step_tokens=tile,
        slot_tokens=1024 if 8 * 1024 * token_bytes <= vmem_budget(chip) else 512,
        chunk_tokens=power_of_two(_UNIT_SCORES // (tile * group_size * heads)),
        num_slots=2,
    )


_PREFILL_LINES = 512
_UNIT_SCORES = 1 << 19


def power_of_two(x: int) -> int:
    """The largest power of two that is at most x, and at least 1."""
    return 1 << max(x.bit_length() - 1, 0)


# Kv heads whose products are issued together, to hide their latency: the few lines of a decode, and
# short chunks of a prefill.
_MAX_DECODE_HEADS = 8
_MAX_PREFILL_HEADS = 4
# More query lines that are computed together would need more registers and code.
_MAX_LINES = 256


def _piece_pages(chunk_pages: int, most_tokens: int | None, block_size: int) -> int:
    """The largest number of pages up to so many tokens that divides a chunk and its half."""
    if most_tokens is None or chunk_pages * block_size <= most_tokens:
        return chunk_pages
    half = chunk_pages // 2 if chunk_pages % 2 == 0 else chunk_pages
    most = max(min(half, most_tokens // block_size), 1)
    return next(n for n in range(most, 0, -1) if half % n == 0)


def _batch_lines(lines: int) -> int:
    """The query lines of a kv head that are computed together, if it has so many."""
    if lines <= _MAX_LINES:
        return lines
    # A 16-bit array is cut at multiples of 16.
    parts = (n for n in range(_MAX_LINES, _MAX_LINES // 4, -16) if lines % n == 0)
    return next(parts, lines)


def _group_parts(group_size: int, tile: int) -> int:
    """The parts in which a prefill takes the query heads of a kv head."""
    return next(
        (
            n
            for n in range(1, group_size)
            if group_size % n == 0
            and _PREFILL_LINES // 4 < group_size // n * tile <= _PREFILL_LINES
        ),
        1,
    )


def _batch_heads(num_kv_heads: int, most: int) -> int:
    """The largest divisor of the number of kv heads up to `most`."""
    return next(n for n in range(min(num_kv_heads, most), 0, -1) if num_kv_heads % n == 0)


def choose_sizes(
    config: AttentionConfig,
    layout: TokenLayout,
    tuning: Tuning,
    *,
    kind: Kind,
    num_tokens: int,
    max_blocks: int,
    block_size: int,
    dtype: DTypeLike,
    chip: Chip,
) -> KernelSizes:
    """The sizes of the tuning, or the largest smaller ones that fit into a core's memory."""
    assert kind != "prefill" or tuning.num_slots == 2, tuning
    budget, taken = vmem_budget(chip), 0
    step = step_tokens(tuning, num_tokens, kind=kind)
    segment_tokens = {"decode": 1, "short": SHORT_ROW, "prefill": step}[kind]
    group_size = config.num_heads // config.num_kv_heads
    parts = _group_parts(group_size, step) if kind == "prefill" else 1
    default_heads = _MAX_PREFILL_HEADS if kind == "prefill" else _MAX_DECODE_HEADS
    most_heads = tuning.batch_heads or default_heads
    most_short_heads = max(_MAX_LINES // (SHORT_ROW * group_size), 1)
    for head_groups in _head_groups(config.num_kv_heads, chip.num_cores):
        heads, is_split = config.num_kv_heads // head_groups, head_groups % chip.num_cores == 0
        for shrink in (1, 2, 4, 8):
            chunk_pages = max(min(tuning.chunk_tokens // shrink // block_size, max_blocks), 1)
            slot_pages = max(min(tuning.slot_tokens // shrink // block_size, max_blocks), 1)
            sizes = KernelSizes(
                layout=layout,
                kind=kind,
                num_tokens=num_tokens,
                step_tokens=step,
                segment_tokens=segment_tokens,
                slot_pages=cdiv(slot_pages, chunk_pages) * chunk_pages,
                chunk_pages=chunk_pages,
                num_slots=tuning.num_slots,
                piece_pages=_piece_pages(chunk_pages, tuning.piece_tokens, block_size),
                batch_heads=_batch_heads(heads * parts, most_heads),
                short_batch_heads=_batch_heads(heads, min(most_heads, most_short_heads)),
                batch_lines=(
                    group_size // parts * step if kind == "prefill" else _batch_lines(group_size)
                ),
                short_batch_lines=_batch_lines(group_size * segment_tokens),
                head_groups=head_groups,
                row_groups=1 if is_split or kind == "prefill" else chip.num_cores,
                group_parts=parts,
            )
            taken = sizes.vmem_bytes(config, block_size=block_size, dtype=dtype)
            if taken <= budget:
                return replace(sizes, vmem_limit_bytes=taken)
    raise ValueError(
        f"attention with head_size={config.head_size}, {config.num_heads} query heads and "
        f"{config.num_kv_heads} kv heads in blocks of {block_size} tokens takes "
        f"{taken / _MIB:.0f} MiB of on-chip memory, of which a kernel on {chip.name} gets "
        f"{budget / _MIB:.0f}"
    )


# Tiles of prefill chunks start at multiples, where a 16-bit array can be cut.
MIN_TILE_TOKENS = 16


def step_tokens(tuning: Tuning, num_tokens: int, *, kind: Kind) -> int:
    """Tokens of a step, the only size that the worklists depend on."""
    if kind == "prefill":
        return max(min(tuning.step_tokens, 1 << (num_tokens - 1).bit_length()), MIN_TILE_TOKENS)
    if kind == "short":
        # So no step is without a segment, except after the last one.
        return min(max(tuning.step_tokens, SHORT_ROW), num_tokens)
    return min(tuning.step_tokens, num_tokens)


def vmem_budget(chip: Chip) -> int:
    """On-chip memory that a kernel may use.

    The compiler uses the rest of a large memory for weights of the next layers.
    """
    return min(chip.vmem_bytes * 3 // 4, 32 * _MIB)


def _head_groups(num_kv_heads: int, num_cores: int) -> list[int]:
    """Ways to split kv heads evenly, fewest groups first; one for every core if possible."""
    divisors = [n for n in range(1, num_kv_heads + 1) if num_kv_heads % n == 0]
    return [n for n in divisors if n % num_cores == 0] or divisors

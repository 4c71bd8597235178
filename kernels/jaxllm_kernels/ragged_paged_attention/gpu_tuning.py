"""Tunables of the GPU kernels: blocks of keys, and the stages of their ring."""

from dataclasses import dataclass
from typing import Literal, get_args

from jaxllm_kernels.common import cdiv, round_up
from jaxllm_kernels.ragged_paged_attention.api import SHORT_ROW, AttentionConfig
from jaxllm_kernels.ragged_paged_attention.tuned import Key, log_if_missing, lookup

# The decode kernel has more in shared memory if it computes short rows, too.
Kernel = Literal["decode", "decode_with_short_rows", "prefill"]

# The most shared memory of a thread block on Hopper.
SHARED_BYTES = 227 * 1024
# What the kernels need of it besides queries and stages: barriers; and, for a decode, weights and
# the scratch of reductions.
_RESERVED_BYTES = {"decode": 12 * 1024, "prefill": 3 * 1024}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The tunable parameters of a kernel."""

    block_tokens: int  # keys per block
    num_stages: int  # blocks that are ready for the matrix instructions, or in flight
    num_staged: int  # blocks of an 8-bit cache that are not converted yet


# Query tokens of a compute warpgroup: the rows of a matrix instruction.
GROUP_TOKENS = 64
NUM_GROUPS = 2
# Query tokens of a prefill tile.
PREFILL_TILE_TOKENS = NUM_GROUPS * GROUP_TOKENS


def padded_group_size(config: AttentionConfig) -> int:
    """Query heads per kv head, padded for the matrix instruction of a decode."""
    return round_up(config.num_heads // config.num_kv_heads, 8)


def num_short_parts(config: AttentionConfig) -> int:
    """The parts into which the query heads of a kv head are cut in short rows.

    Each head has SHORT_ROW columns of an item's products. More than eight heads do not fit in the
    registers of a warpgroup; with head size 256, with panels that overlap, or beside a producer
    that converts, more than four do not. Parts are other items, which read the same keys again.
    """
    has_room = config.head_size in (64, 128) and config.kv_dtype is None
    return cdiv(config.num_heads // config.num_kv_heads, 8 if has_room else 4)


def short_heads(config: AttentionConfig) -> int:
    """Query heads of a part; the last part may have fewer."""
    return cdiv(config.num_heads // config.num_kv_heads, num_short_parts(config))


def reduction_bytes(num_columns: int, head_size: int) -> int:
    """Shared memory in which the warps of a decode reduce this number of columns.

    128 bytes per column are one round; half of that are two rounds, with twice the barriers. More
    than 32 columns, and head size 256, take more rounds: for fewer they would need registers that
    are not there.
    """
    return 4096 if 16 < num_columns <= 32 and head_size <= 128 else 2048


def num_query_slots(num_staged: int) -> int:
    """Items of a decode whose queries are in shared memory.

    The producer sends the next item's queries while this item's blocks are used. When it waits for
    the slot of an earlier item, it has not converted the last `num_staged` blocks yet. These may
    belong to as many items, and the slot's item must not be one of them.
    """
    return max(2, num_staged + 1)


def choose_tuning(kernel: Kernel, config: AttentionConfig, chip: str) -> Tuning:
    """The parameters of a kernel for a layer: measured ones for the chip, or from a formula."""
    measured = lookup(chip, *_tuned_key(kernel, config))
    return default_tuning(kernel, config) if measured is None else Tuning(**measured)


def log_untuned(config: AttentionConfig, chip: str) -> None:
    """Log which kernels of a layer have no measurements on the chip."""
    for kernel in get_args(Kernel):
        log_if_missing(chip, *_tuned_key(kernel, config))


def _tuned_key(kernel: Kernel, config: AttentionConfig) -> tuple[str, Key]:
    """The kernel's name, and the facts that its measured parameters depend on."""
    return f"gpu_{kernel}", {
        "group_size": config.num_heads // config.num_kv_heads,
        "head_size": config.head_size,
        "kv_dtype": config.kv_dtype,
    }


def default_tuning(kernel: Kernel, config: AttentionConfig) -> Tuning:
    """Parameters for cases without measurements.

    Blocks have 128 keys if several fit, and there are as many stages as fit, up to four. About
    33 KB in flight per multiprocessor cover the latency of an H200's memory at full bandwidth
    (4.3 TB/s for a microsecond), so more than four do not help. The formula has not been timed.
    """
    head_size = config.head_size
    block_tokens = 128 if head_size <= 128 else 64
    block_bytes = 2 * block_tokens * head_size  # keys and values of one byte
    most_stages, most_staged = (2, 1) if kernel == "prefill" else (4, 2)
    num_staged = 0 if config.kv_dtype is None else most_staged
    if kernel == "prefill":
        other_bytes = _RESERVED_BYTES["prefill"] + PREFILL_TILE_TOKENS * head_size * 2
    else:
        query_rows = num_query_slots(num_staged) * padded_group_size(config)
        other_bytes = _RESERVED_BYTES["decode"] + query_rows * head_size * 2
    if kernel == "decode_with_short_rows":
        # The queries of one item, and what weights and reductions need more than is reserved.
        columns = short_heads(config) * SHORT_ROW
        other_bytes += columns * (head_size + block_tokens) * 2
        other_bytes += reduction_bytes(columns, head_size) - reduction_bytes(0, head_size)
    room = SHARED_BYTES - other_bytes - num_staged * block_bytes
    return Tuning(
        block_tokens=block_tokens,
        num_stages=min(most_stages, room // (2 * block_bytes)),
        num_staged=num_staged,
    )

"""Sizes of the TPU kernels' blocks of weights, and the on-chip memory that the kernels take."""

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.common import cdiv, round_up
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.tpu_product import LANES, WIDENED_INPUTS

# Rows of a vector register of 32-bit numbers.
SUBLANES = 8

# Rows of 16-bit numbers that can be copied.
ROW_TILE = 16

_MIB = 1 << 20

# About the most bytes of a block of weights, the best first. A block of the first size takes some
# microseconds to load, so starting its copy costs little.
_BLOCK_BYTES = (4 * _MIB, 2 * _MIB, _MIB)
# On-chip memory that the compiler itself needs, rounded up.
_RESERVE = 2 * _MIB


class Stored(NamedTuple):
    """How an expert's matrices are stored."""

    dtype: DTypeLike  # of weights, or of codes
    # The groups of inputs that share a scale of an output; 0: weights are no codes.
    gate_up_groups: int = 0
    down_groups: int = 0


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How a kernel walks over the weights of an expert: first blocks of intermediate values, of
    gate and up together, then blocks of outputs. The last block of each may be shorter."""

    num_halves: int  # 2: gate and up; 1: up alone
    size: int  # F
    hidden_size: int  # D
    stored: Stored
    inner: int  # intermediate values of a block
    outer: int  # outputs of a block
    # Whether a matrix has its inputs in rows and its outputs in lanes.
    turns_gate_up: bool
    turns_down: bool

    @property
    def num_inner(self) -> int:
        return cdiv(self.size, self.inner)

    @property
    def num_outer(self) -> int:
        return cdiv(self.hidden_size, self.outer)

    @property
    def num_steps(self) -> int:
        return self.num_inner + self.num_outer

    @property
    def padded_size(self) -> int:
        return self.num_inner * self.inner

    @property
    def padded_hidden_size(self) -> int:
        return self.num_outer * self.outer

    def vmem_bytes(self, dtype: DTypeLike) -> int:
        """Memory of the blocks, of which one of each kind is loaded while another is computed, for
        activations of this dtype. Biases are small."""
        code, gate_up_groups, down_groups = self.stored
        gate_up = matrix_bytes(self.inner, self.hidden_size, self.turns_gate_up, code)
        down = matrix_bytes(self.outer, self.size, self.turns_down, code)
        widened = 0
        if gate_up_groups:
            gate_up += padded_bytes((gate_up_groups, self.inner), jnp.float32)
            down += padded_bytes((down_groups, self.outer), jnp.float32)
            widened = padded_bytes((max(self.inner, self.outer), WIDENED_INPUTS), jnp.float32)
        halves = self.num_halves
        biases = padded_bytes((halves, self.inner), dtype) + padded_bytes((1, self.outer), dtype)
        return 2 * (halves * gate_up + down + biases) + widened + _RESERVE

    def flops(self, num_rows: int) -> int:
        """The operations of an expert's products with so many rows."""
        return 2 * (self.num_halves + 1) * num_rows * self.size * self.hidden_size


def choose_blocks(
    num_halves: int, size: int, hidden_size: int, stored: Stored, block_bytes: int
) -> Blocks:
    itemsize = jnp.dtype(stored.dtype).itemsize
    return Blocks(
        num_halves=num_halves,
        size=size,
        hidden_size=hidden_size,
        stored=stored,
        inner=block_of(size, num_halves * hidden_size * itemsize, block_bytes),
        outer=block_of(hidden_size, size * itemsize, block_bytes),
        turns_gate_up=is_turned(size, hidden_size),
        turns_down=is_turned(hidden_size, size),
    )


def is_turned(num_outputs: int, num_inputs: int) -> bool:
    """Whether XLA keeps arrays of such matrices with the outputs last in memory: it does if that
    pads less. Otherwise the inputs are last, as they are by their axes."""
    rows, lanes = SUBLANES, LANES
    turned_size = round_up(num_inputs, rows) * round_up(num_outputs, lanes)
    return turned_size < round_up(num_outputs, rows) * round_up(num_inputs, lanes)


def matrix_bytes(num_outputs: int, num_inputs: int, is_turned: bool, dtype: DTypeLike) -> int:
    shape = (num_inputs, num_outputs) if is_turned else (num_outputs, num_inputs)
    return padded_bytes(shape, dtype)


def block_of(count: int, num_bytes: int, block_bytes: int) -> int:
    """How many of `count` outputs, of so many bytes each, a block has: all, or whole registers of
    about equal blocks."""
    num_blocks = cdiv(count * num_bytes, block_bytes)
    return min(count, round_up(cdiv(count, num_blocks), LANES)) if num_blocks > 1 else count


def few_vmem_bytes(blocks: Blocks, num_tokens: int, num_choices: int, dtype: DTypeLike) -> int:
    """Memory of the kernel for few tokens."""
    x = padded_bytes((num_tokens, blocks.hidden_size), dtype)
    y = padded_bytes((num_tokens, blocks.padded_hidden_size), jnp.float32)
    inner = padded_bytes((num_tokens, blocks.padded_size), dtype)
    choices = 2 * padded_bytes((num_tokens, num_choices), jnp.float32)
    # What a step computes: gate, up and what becomes of them, or outputs and their share.
    computed = 4 * padded_bytes((num_tokens, max(blocks.inner, blocks.outer)), jnp.float32)
    return blocks.vmem_bytes(dtype) + 2 * (x + y + choices) + inner + computed


@dataclass(frozen=True, kw_only=True)
class ManySizes:
    """Sizes of the kernel for many tokens."""

    # Choices of an item, for which an expert's weights are read once.
    item_rows: int
    # Rows that are multiplied at a time.
    tile_rows: int
    # A token's words, and its numbers, of which the last may be padding.
    word_lanes: int
    token_lanes: int

    def word_dtype(self, dtype: DTypeLike) -> jnp.dtype:
        return jnp.dtype(jnp.float32 if self.word_lanes == self.token_lanes else jnp.int32)

    def vmem_bytes(self, blocks: Blocks, num_tokens: int, dtype: DTypeLike) -> int:
        words = padded_bytes((num_tokens + self.item_rows, self.word_lanes), jnp.int32)
        sums = padded_bytes((num_tokens + SUBLANES, blocks.padded_hidden_size), jnp.float32)
        factors = padded_bytes((self.item_rows, 1), jnp.float32)
        rows = padded_bytes((self.item_rows, self.token_lanes), dtype)
        inner = padded_bytes((self.item_rows, blocks.padded_size), dtype)
        # The outputs of a tile, what a step computes, and of what.
        computed = 5 * padded_bytes((self.tile_rows, max(blocks.inner, blocks.outer)), jnp.float32)
        computed += padded_bytes((self.tile_rows, max(blocks.size, self.token_lanes)), dtype)
        return blocks.vmem_bytes(dtype) + words + sums + factors + rows + inner + computed


def many_sizes(hidden_size: int, dtype: DTypeLike, *, item_rows: int, tile_rows: int) -> ManySizes:
    """Sizes for as many rows; those of a token follow from its size."""
    is_wide = jnp.dtype(dtype) == jnp.float32
    words = hidden_size if is_wide else round_up(cdiv(hidden_size, 2), LANES)
    return ManySizes(
        item_rows=item_rows,
        tile_rows=tile_rows,
        word_lanes=words,
        token_lanes=words if is_wide else 2 * words,
    )


def few_tokens(chip: Chip) -> int:
    """Up to how many tokens all of them are multiplied by each expert: as many as a core multiplies
    while it reads the expert's weights, at four fifths of its rate."""
    tokens = int(0.8 * chip.bf16_flops_per_second / chip.hbm_bytes_per_second)
    return 1 << (tokens.bit_length() - 1)


def choose_few(
    num_tokens: int,
    num_choices: int,
    num_halves: int,
    size: int,
    hidden_size: int,
    stored: Stored,
    dtype: DTypeLike,
    chip: Chip,
) -> Blocks:
    """The largest blocks with which the kernel for few tokens fits into a core's memory."""
    for block_bytes in _BLOCK_BYTES:
        blocks = choose_blocks(num_halves, size, hidden_size, stored, block_bytes)
        if few_vmem_bytes(blocks, num_tokens, num_choices, dtype) <= vmem_budget(chip):
            return blocks
    raise _too_large(size, hidden_size, chip)


def choose_many(
    num_tokens: int,
    num_choices: int,
    num_experts: int,
    num_halves: int,
    size: int,
    hidden_size: int,
    stored: Stored,
    dtype: DTypeLike,
    chip: Chip,
) -> tuple[int, ManySizes, Blocks]:
    """The tokens of a call of the kernel for many tokens, and its sizes: each as large as possible,
    because every call reads the weights again, and so does every item of large experts."""
    for num_calls in range(1, cdiv(num_tokens, _FEWEST_TOKENS) + 1):
        tokens = round_up(cdiv(num_tokens, num_calls), ROW_TILE)
        if 8 * tokens * num_choices > chip.smem_bytes // 2:
            continue
        tile_rows = 128 if tokens * num_choices <= 64 * num_experts else 256
        for item_rows, block_bytes in itertools.product((512, 256), _BLOCK_BYTES):
            sizes = many_sizes(hidden_size, dtype, item_rows=item_rows, tile_rows=tile_rows)
            blocks = choose_blocks(num_halves, size, hidden_size, stored, block_bytes)
            if sizes.vmem_bytes(blocks, tokens, dtype) <= vmem_budget(chip):
                return tokens, sizes, blocks
    raise _too_large(size, hidden_size, chip)


# In a call for fewer tokens, reading the weights would take longer than XLA's loop over experts.
_FEWEST_TOKENS = 256


def _too_large(size: int, hidden_size: int, chip: Chip) -> ValueError:
    return ValueError(
        f"experts of size {size} and hidden_size={hidden_size} take more on-chip memory than a "
        f"kernel on {chip.name} gets, {vmem_budget(chip) // _MIB} MiB"
    )


def padded_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Bytes of an array whose last two dimensions are padded to whole tiles."""
    *major, rows, lanes = shape
    itemsize = jnp.dtype(dtype).itemsize
    tile = round_up(rows, 32 // itemsize) * round_up(lanes, LANES)
    return math.prod(major) * tile * itemsize


def vmem_budget(chip: Chip) -> int:
    """On-chip memory that a kernel may use. The rest is for weights of other layers."""
    return chip.vmem_bytes * 3 // 4

"""How the TPU kernel cuts queries, keys and heads, by what a core's memory holds."""

from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxllm_kernels.common import cdiv, round_up
from jaxllm_kernels.platform import Chip
from jaxllm_kernels.ragged_paged_attention.tpu_layout import LANES, SUBLANES, sublane_tile
from jaxllm_kernels.ragged_self_attention.api import SelfAttentionConfig

# Queries of a step of the grid, and keys of a block. They are columns and rows of the matrix units,
# of which the larger ones have 256.
_TILE = 256
# A step of the grid computes at least so many heads if it can, so that some have products while
# others have exponentials, and at most so many, since more make the code longer.
_FEWEST_HEADS, _MOST_HEADS = 8, 12


class Heads(NamedTuple):
    """The heads of a device."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int | None = None  # None: head_size

    @property
    def value_size(self) -> int:
        return self.v_head_size or self.head_size

    @property
    def group(self) -> int:
        """The query heads of a kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def lanes(self) -> int:
        """The lanes that a key takes in whole registers."""
        return round_up(self.head_size, LANES)

    def value_rows(self, dtype: DTypeLike) -> int:
        """The rows of values, which the kernel has turned. Those behind the values are ones, so
        that the product with weights has the sum of weights, too."""
        return round_up(self.value_size + 1, sublane_tile(dtype))


class KernelSizes(NamedTuple):
    tile: int  # queries of a step of the grid
    block: int  # keys of a block
    kv_heads: int  # whose keys and values are in memory at a time
    heads: int  # query heads of a step of the grid
    buffers: int  # 2: keys and values of the next heads are loaded meanwhile


def padded_tokens(num_tokens: int) -> int:
    """The tokens that the kernel computes: whole tiles."""
    return round_up(num_tokens, LANES if num_tokens <= LANES else _TILE)


def vmem_bytes(num_tokens: int, heads: Heads, sizes: KernelSizes, dtype: DTypeLike) -> int:
    """What the kernel has in memory."""
    size, value_rows = jnp.dtype(dtype).itemsize, heads.value_rows(dtype)
    # A key and a value; a query and an output.
    loaded = sum(round_up(n, sublane_tile(dtype)) for n in (heads.head_size, heads.value_size))
    of_key = (sizes.buffers * loaded + heads.lanes + value_rows) * size
    of_query = (2 * loaded + heads.lanes) * size + 4 * (value_rows + 2 * SUBLANES)
    # The scores of some heads are what lies between the steps of their computation.
    scores = (sizes.heads + 4) * sizes.block * sizes.tile * 4
    return num_tokens * sizes.kv_heads * of_key + sizes.tile * sizes.heads * of_query + scores


def choose_sizes(num_tokens: int, heads: Heads, dtype: DTypeLike, chip: Chip) -> KernelSizes:
    """Keys and values of as many heads as a step of the grid should compute, of all tokens of the
    batch. Raises ValueError if those of a single head do not fit."""
    tokens = padded_tokens(num_tokens)
    tile = min(_TILE, tokens)
    of_steps = [(n, _largest_divisor(n * heads.group, _MOST_HEADS)) for n in _kv_heads(heads)]
    # The queries of a key take room as well. Where they leave none, a step has a part of them.
    _, most = of_steps[-1]
    parts = [(1, n) for n in range(most - 1, 0, -1) if heads.group % n == 0]
    for choices in (of_steps, parts):
        # The second choice is one buffer, where loading the next heads is not hidden.
        for buffers in (2, 1):
            for kv_heads, of_step in choices:
                sizes = KernelSizes(tile, tile, kv_heads, of_step, buffers)
                if vmem_bytes(tokens, heads, sizes, dtype) <= chip.vmem_bytes // 2:
                    return sizes
    raise ValueError(f"keys and values of {num_tokens} tokens do not fit into VMEM")


def _kv_heads(heads: Heads) -> list[int]:
    """How many kv heads a step of the grid can have, best first."""
    wanted = cdiv(_FEWEST_HEADS, heads.group)
    counts = [n for n in range(1, heads.num_kv_heads + 1) if heads.num_kv_heads % n == 0]
    most = next((n for n in counts if n >= wanted), counts[-1])
    return [n for n in reversed(counts) if n <= most]


def _largest_divisor(number: int, most: int) -> int:
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def keys_of_query(num_tokens: int, num_rows: int, config: SelfAttentionConfig) -> int:
    """About how many keys a query sees, which the lengths of rows decide: if rows share the batch
    evenly, but no fewer than a text has."""
    seen = min(num_tokens, max(num_tokens // max(num_rows, 1), 2 * _TILE))
    if config.reach is not None:
        seen = min(seen, 2 * config.reach + 1)
    return cdiv(seen, 2) if config.causal else seen

"""Groups of layers that keep the keys and values of the same tokens, and their shares of the cache.

A layer without a window keeps all tokens. A layer with a window keeps the tokens that the next one
still sees. Layers that keep the same tokens are a group: they share block tables and a pool of
blocks, whatever their heads are. All groups have one block size in tokens, which is also the unit
of prefix hashes.

The plan makes the groups. They are all that the scheduler knows of the model's layers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share block tables, and the size of their pool of blocks."""

    # How many tokens a token sees, itself included; None: all before it.
    window: int | None
    num_blocks: int
    max_blocks_per_request: int  # a request never holds more

    def first_block(self, num_tokens: int, block_size: int) -> int:
        """The first block that is still read once `num_tokens` tokens have been computed."""
        if self.window is None:
            return 0
        return max(num_tokens - self.window + 1, 0) // block_size


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """The numbers that determine the sizes of groups."""

    block_size: int
    max_model_len: int
    max_num_batched_tokens: int

    def max_blocks(self, window: int | None) -> int:
        """The most blocks that one request can hold at once: those that the first token of a step
        sees, and those for the step's own tokens."""
        return self._blocks_seen(window, self.max_num_batched_tokens)

    def _blocks_seen(self, window: int | None, num_new_tokens: int) -> int:
        whole = -(-self.max_model_len // self.block_size)
        if window is None:
            return whole
        return min(whole, -(-(window - 1 + num_new_tokens) // self.block_size) + 1)

    def divide(self, windows: Sequence[int | None], num_blocks: int) -> tuple[CacheGroup, ...]:
        """Make the groups, the first with `num_blocks` blocks.

        How many blocks another group should have depends on the requests. If all are shorter than
        its window, it needs as many as the first group. If all have the maximum length, it needs
        the share of blocks that a decoding request holds there. The geometric mean of both shares
        is wrong by the same factor in either case.
        """
        first = windows[0]
        groups = []
        for window in windows:
            share = math.sqrt(self._blocks_seen(window, 1) / self._blocks_seen(first, 1))
            limit = self.max_blocks(window)
            blocks = num_blocks if window == first else max(limit, math.ceil(num_blocks * share))
            groups.append(
                CacheGroup(window=window, num_blocks=blocks, max_blocks_per_request=limit)
            )
        return tuple(groups)


def group_windows(windows: Iterable[int | None]) -> tuple[int | None, ...]:
    """The distinct windows of these layers, one for each group, the longest first."""
    distinct = set(windows)
    without: tuple[None, ...] = (None,) if None in distinct else ()
    return without + tuple(sorted((w for w in distinct if w is not None), reverse=True))


def room_for(groups: Iterable[CacheGroup], context: int, block_size: int) -> int:
    """How many requests with contexts of `context` tokens have room in all groups."""

    def kept(window: int | None) -> int:
        """The number of tokens in the blocks that a decoding request holds."""
        if window is None:
            return context
        return min(context, (-(-window // block_size) + 1) * block_size)

    return min(group.num_blocks * block_size // kept(group.window) for group in groups)


def num_fitting(cache_bytes: Callable[[int], int], room: int) -> int:
    """The largest number of blocks whose cache takes at most `room` bytes."""
    low, high = 0, 1
    while cache_bytes(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cache_bytes(middle) <= room else (low, middle)
    return low


def describe_groups(groups: Iterable[CacheGroup], block_size: int) -> str:
    """The blocks of each group, as text for people."""

    def describe(group: CacheGroup) -> str:
        window = "" if group.window is None else f" for windows of {group.window}"
        tokens = group.num_blocks * block_size
        return f"{group.num_blocks} blocks of {block_size} = {tokens} tokens{window}"

    return ", ".join(map(describe, groups))

"""Groups of layers that keep the keys and values of the same tokens, and their shares of the cache.

A layer without a window keeps all tokens. A layer with a window keeps the tokens that the next one
still sees, and so does one with chunks. Layers that keep the same tokens are a group: they share
block tables and a pool of blocks, whatever their heads are. All groups have one block size in
tokens, which is also the unit of prefix hashes.

The plan makes the groups. They are all that the scheduler knows of the model's layers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxllm.plural import counted

# Lengths for which a plan says how many requests fit, beside the longest one.
_SHOWN_LENGTHS = (512, 4096)
# Most texts and conversations are shorter. With it, Gemma 3 (five layers of six with windows of
# 1024) has three quarters of the longest requests that fit if nothing were left to the windows.
DEFAULT_REQUEST_LEN = 8192


@dataclass(frozen=True, slots=True)
class Chunk:
    """In place of a window: a token sees those of its own chunk, up to itself. Contexts are cut
    into chunks of so many tokens, from their beginning on."""

    size: int

    def __str__(self) -> str:
        return f"chunks of {self.size}"


# How many tokens a token sees, itself included; None: all before it.
Window = int | Chunk | None


class Attention(Protocol):
    """What layers with the same cache have in common."""

    @property
    def sliding_window(self) -> int | None: ...

    @property
    def chunk(self) -> int | None: ...


def window_of(attention: Attention) -> Window:
    """The window or the chunks of an attention."""
    return attention.sliding_window if attention.chunk is None else Chunk(attention.chunk)


@dataclass(frozen=True, kw_only=True)
class CacheGroup:
    """Layers that share block tables, and the size of their pool of blocks."""

    window: Window
    num_blocks: int
    max_blocks_per_request: int  # a request never holds more

    def first_block(self, num_tokens: int, block_size: int) -> int:
        """The first block that is still read once `num_tokens` tokens have been computed."""
        match self.window:
            case None:
                return 0
            case Chunk(size):
                return num_tokens // size * size // block_size
            case window:
                return max(num_tokens - window + 1, 0) // block_size

    def last_read(self, block: int, block_size: int) -> int | None:
        """How many tokens have been computed when a block is read no more; None: it always is."""
        end = (block + 1) * block_size
        match self.window:
            case None:
                return None
            case Chunk(size):
                return -(-end // size) * size
            case window:
                return end + window - 1


@dataclass(frozen=True, kw_only=True)
class StateSnapshots:
    """How many copies of recurrent layers' states are kept, so that requests share prefixes."""

    count: int
    stride: int  # rows end at its multiples, in tokens; a multiple of the block size


@dataclass(frozen=True, kw_only=True)
class CacheSizes:
    """The numbers that determine the sizes of groups."""

    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    # The length of requests for which groups are divided; None: DEFAULT_REQUEST_LEN.
    request_len: int | None = None

    def max_blocks(self, window: Window) -> int:
        """The most blocks that one request can hold at once: those that the first token of a step
        sees, and those for the step's own tokens."""
        whole = -(-self.max_model_len // self.block_size)
        if window is None:
            return whole
        most = _most_seen(window) - 1 + self.max_num_batched_tokens
        return min(whole, -(-most // self.block_size) + 1)

    def divide(self, windows: Sequence[Window], num_blocks: int) -> tuple[CacheGroup, ...]:
        """Make the groups, the first with `num_blocks` blocks.

        How many blocks another group should have depends on the requests: those shorter than its
        window hold as many there as in the first group, long ones a small share. So the groups are
        divided for decoding requests of one length, which hold the same share of each. Shorter
        requests find less room than there could be, in the windows; so do longer ones, elsewhere.
        """
        length = min(self.request_len or DEFAULT_REQUEST_LEN, self.max_model_len)
        held = [blocks_held(window, length, self.block_size) for window in windows]
        groups = []
        for window, its in zip(windows, held, strict=True):
            limit = self.max_blocks(window)
            blocks = max(limit, -(-num_blocks * its // held[0])) if groups else num_blocks
            groups.append(
                CacheGroup(window=window, num_blocks=blocks, max_blocks_per_request=limit)
            )
        return tuple(groups)


def group_windows(windows: Iterable[Window]) -> tuple[Window, ...]:
    """The distinct windows of these layers, one for each group, the longest first."""
    distinct = set(windows)
    without: tuple[None, ...] = (None,) if None in distinct else ()
    others = (window for window in distinct if window is not None)
    return without + tuple(
        sorted(others, key=lambda its: (_most_seen(its), isinstance(its, Chunk)), reverse=True)
    )


def _most_seen(window: int | Chunk) -> int:
    """How many tokens a token sees at most."""
    return window.size if isinstance(window, Chunk) else window


def room_for(groups: Iterable[CacheGroup], context: int, block_size: int) -> int:
    """How many decoding requests with contexts of `context` tokens have room in all groups."""
    return min(
        group.num_blocks // blocks_held(group.window, context, block_size) for group in groups
    )


def shown_lengths(max_model_len: int) -> list[int]:
    """The lengths for which a plan says how many requests fit."""
    return [*(length for length in _SHOWN_LENGTHS if length < max_model_len), max_model_len]


def describe_room(room_for: Callable[[int], int], lengths: Iterable[int]) -> str:
    """How many requests of these lengths have room, the longest first, as text for people."""
    first, *others = sorted(set(lengths), reverse=True)
    rest = (f", {room_for(length)} of {length}" for length in others)
    return f"{counted(room_for(first), 'request')} of {first} tokens{''.join(rest)}"


def blocks_held(window: Window, context: int, block_size: int) -> int:
    """The most blocks that a decoding request with a context of so many tokens holds."""
    whole = -(-context // block_size)
    if window is None:
        return whole
    # The tokens that are seen may begin and end within a block: with a window at every place in it.
    last_place = block_size - 1
    if isinstance(window, Chunk):
        last_place = block_size - math.gcd(window.size, block_size)
    return min(whole, -(-(last_place + _most_seen(window)) // block_size))


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
        window = f"windows of {group.window}" if isinstance(group.window, int) else group.window
        tokens = group.num_blocks * block_size
        return f"{group.num_blocks} blocks of {block_size} = {tokens} tokens" + (
            f" for {window}" if window else ""
        )

    return ", ".join(map(describe, groups))

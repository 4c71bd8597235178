"""What one request holds: blocks in one group of layers, and places for snapshots of its state."""

from typing import NamedTuple


class PendingSnapshot(NamedTuple):
    """A snapshot that cannot be found yet: the host does not know all of its tokens."""

    num_blocks: int  # of the prefix
    place: int
    is_passed: bool  # at the stride: of less use once its request has a later one


class BlockTable:
    """The blocks of a request from block `start` up to block `end`. Earlier blocks have been given
    back."""

    __slots__ = ("blocks", "end", "num_sent", "start")

    def __init__(self, start: int, blocks: list[int]) -> None:
        self.start = start
        self.end = start + len(blocks)
        self.blocks = blocks
        self.num_sent = start  # the device has the table up to this block

    def append(self, blocks: list[int]) -> None:
        self.blocks += blocks
        self.end += len(blocks)

    def drop_until(self, start: int) -> list[int]:
        """Remove the blocks before block `start`, and return them."""
        count = start - self.start
        dropped = self.blocks[:count]
        del self.blocks[:count]
        self.start += len(dropped)
        return dropped

    def take_unsent(self) -> tuple[int, list[int]]:
        """Return the blocks that the device does not have yet, and the index of the first."""
        first = self.num_sent if self.num_sent > self.start else self.start
        self.num_sent = self.end
        return first, self.blocks[first - self.start :]

"""The blocks that one request holds in one group of layers."""


class BlockTable:
    """The blocks of a request from block `start` on. Earlier blocks have been given back."""

    __slots__ = ("blocks", "num_sent", "start")

    def __init__(self, start: int, blocks: list[int]) -> None:
        self.start = start
        self.blocks = blocks
        self.num_sent = start  # the device has the table up to this block

    @property
    def end(self) -> int:
        """One past the index of the last block."""
        return self.start + len(self.blocks)

    def drop_until(self, start: int) -> list[int]:
        """Remove the blocks before block `start`, and return them."""
        count = start - self.start
        dropped = self.blocks[:count]
        del self.blocks[:count]
        self.start += len(dropped)
        return dropped

    def take_unsent(self) -> tuple[int, list[int]]:
        """Return the blocks that the device does not have yet, and the index of the first."""
        first = max(self.num_sent, self.start)
        self.num_sent = self.end
        return first, self.blocks[first - self.start :]

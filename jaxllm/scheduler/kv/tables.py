"""The blocks that one request holds in one group of layers."""


class BlockTable:
    """The blocks of a request's tokens from block `start` on. Those before have been given back."""

    __slots__ = ("blocks", "num_sent", "start")

    def __init__(self, start: int, blocks: list[int]) -> None:
        self.start = start
        self.blocks = blocks
        self.num_sent = start  # up to this block the device has the table

    @property
    def end(self) -> int:
        """The index after that of the last block."""
        return self.start + len(self.blocks)

    def drop_until(self, start: int) -> list[int]:
        """Let go of the blocks before block `start`, and return them."""
        count = start - self.start
        dropped = self.blocks[:count]
        del self.blocks[:count]
        self.start += len(dropped)
        return dropped

    def take_unsent(self) -> tuple[int, list[int]]:
        """Return what the device does not have yet: the first block's index, and the blocks."""
        first = max(self.num_sent, self.start)
        self.num_sent = self.end
        return first, self.blocks[first - self.start :]

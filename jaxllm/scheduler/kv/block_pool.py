"""The KV blocks: which are free, how many tables refer to each, and which hold a known prefix.

A block is in use while its reference count is above zero. A free block is *blank*, or it is
*cached*: its content has a hash and can be shared again. The pool hands out blank blocks first,
then cached blocks, the least recently used first. A cached block loses its content then.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Blocks 0 to num_blocks - 1. Every operation costs O(1) per block it names."""

    def __init__(
        self, num_blocks: int, evicted: Callable[[int, bytes], None] | None = None
    ) -> None:
        """`evicted` is called for a block that is about to be overwritten, with its content."""
        self.num_blocks = num_blocks
        self._evicted = evicted
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        # A hash names one block. Two requests that compute the same prefix side by side fill two
        # blocks. Only the first is entered here; the other stays private and becomes blank.
        self._block_of: dict[bytes, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))  # the last is taken first
        # Insertion order is the order of release. A plain dict would be slow: to find its first key
        # takes longer with every deletion at the front.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def count_free(self, blocks: Iterable[int]) -> int:
        """Count how many of these blocks have no references."""
        ref_counts = self._ref_counts
        return sum(not ref_counts[block] for block in blocks)

    def take(self, count: int) -> list[int]:
        """Hand out free blocks, with one reference each."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        blank = self._blank
        split = max(len(blank) - count, 0)
        taken = blank[split:]
        del blank[split:]
        while len(taken) < count:
            block, _ = self._cached.popitem(last=False)
            content = self._unname(block)
            if self._evicted is not None:
                self._evicted(block, content)
            taken.append(block)
        for block in taken:
            self._ref_counts[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block. A block may be in use or cached."""
        ref_counts = self._ref_counts
        for block in blocks:
            if ref_counts[block] == 0:
                del self._cached[block]
            ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a prefix.

        The last block goes first, so the tail of a prefix is reused before its head: without the
        head the rest could not be found.
        """
        ref_counts, hashes = self._ref_counts, self._hashes
        for block in reversed(blocks):
            count = ref_counts[block] - 1
            assert count >= 0, f"block {block} released twice"
            ref_counts[block] = count
            if count == 0:
                if hashes[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def find(self, content: bytes) -> int | None:
        """Return the block with this content hash."""
        return self._block_of.get(content)

    def register(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Name the contents of blocks in use, except contents that another block already has."""
        block_of, hashes, ref_counts = self._block_of, self._hashes, self._ref_counts
        for block, content in zip(blocks, contents, strict=True):
            assert ref_counts[block] > 0, f"block {block} is free and cannot be registered"
            if content not in block_of:
                assert hashes[block] is None, f"block {block} already has another content"
                block_of[content] = block
                hashes[block] = content

    def forget(self, content: bytes) -> None:
        """Make a content unfindable, because the block does not hold what its hash says."""
        block = self._block_of.get(content)
        if block is None:
            return
        self._unname(block)
        if self._ref_counts[block] == 0:
            del self._cached[block]
            self._blank.append(block)

    def reset(self) -> bool:
        """Forget all contents. Does nothing and returns False while a block is in use."""
        if self.num_used:
            return False
        for block in list(self._cached):
            self._unname(block)
        self._blank.extend(self._cached)
        self._cached.clear()
        return True

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert the invariants, given every block table. O(blocks)."""
        references = Counter(block for table in tables for block in table)
        free = self._blank + list(self._cached)
        assert len(set(free)) == len(free), "a block is free twice"
        for block in range(self.num_blocks):
            assert self._ref_counts[block] == references[block], (
                f"block {block}: {self._ref_counts[block]} counted references, "
                f"{references[block]} in tables"
            )
        assert all(self._ref_counts[block] == 0 for block in free), "a free block is in use"
        used = sum(count > 0 for count in self._ref_counts)
        assert used + len(free) == self.num_blocks, f"{self.num_blocks - used - len(free)} leaked"
        named = {block: name for block, name in enumerate(self._hashes) if name is not None}
        assert {name: block for block, name in named.items()} == self._block_of
        assert all(self._hashes[block] is None for block in self._blank), "a blank block is named"
        assert all(self._hashes[block] is not None for block in self._cached)

    def _unname(self, block: int) -> bytes:
        content = self._hashes[block]
        assert content is not None, f"block {block} has no content"
        del self._block_of[content]
        self._hashes[block] = None
        return content

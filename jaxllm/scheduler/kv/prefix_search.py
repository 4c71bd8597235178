"""Finds the longest head of a request whose blocks are there, on the devices or on the host."""

from collections.abc import Sequence

from jaxllm.cache_groups import CacheGroup
from jaxllm.scheduler.kv.block_pool import BlockPool
from jaxllm.scheduler.kv.host_tier import HostTier
from jaxllm.scheduler.kv.prefix_hash import block_hashes, embeds_marks, image_marks
from jaxllm.scheduler.request import Request

_STRIDE = 64  # how many blocks a search hashes at a time


class PrefixSearch:
    """Looks into the pools of all groups, and into their second home if there is one."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        pools: Sequence[BlockPool],
        block_size: int,
        tier: HostTier | None,
    ) -> None:
        self._groups = groups
        self._pools = pools
        self._block_size = block_size
        self._tier = tier
        self._all_have_windows = all(group.window is not None for group in groups)

    def longest(self, request: Request, length: int, *, now: bool) -> int:
        """Return the length in blocks of the longest prefix, at most `length`, of which every group
        has every block that later tokens read. Without `now`, what is on its way to the host
        counts, and what would first be read from files."""
        num_agreed = index = 0
        while length and num_agreed < len(self._groups):
            found = self._longest_in_group(request, index, length, now)
            num_agreed = num_agreed + 1 if found == length else 1
            length = found
            index = (index + 1) % len(self._groups)
        return length

    def missing(self, request: Request, index: int, length: int) -> list[bytes]:
        """The contents of a prefix that no block of a group has."""
        start = self._groups[index].first_block(length * self._block_size, self._block_size)
        pool = self._pools[index]
        return [one for one in request.block_hashes[start:length] if pool.find(one) is None]

    def hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Hash the request's first `num_blocks` blocks; each is hashed once per request."""
        hashes, root, size = request.block_hashes, request.hash_root, self._block_size
        assert root is not None, request
        start, end = len(hashes) * size, num_blocks * size
        if start < end:
            tokens = request.known_tokens(start, end)
            marks = image_marks(request.images, len(hashes), num_blocks, size)
            if request.embeds is not None:
                marks = embeds_marks(request.embeds, len(hashes), num_blocks)
            parent = hashes[-1] if hashes else root
            hashes += block_hashes(parent, tokens, size, marks)

    def _longest_in_group(self, request: Request, index: int, length: int, now: bool) -> int:
        """The same for one group."""
        group = self._groups[index]
        if group.window is None:
            hashes = request.block_hashes
            for found in range(length):
                if found == len(hashes):
                    # Not all at once: after the first miss no more are needed for now.
                    self.hash_blocks(request, min(found + _STRIDE, length))
                if not self._has(index, hashes[found], now):
                    return found
            return length
        self.hash_blocks(request, length)
        first = length  # the group has all blocks from here up to `length`
        while length:
            start = group.first_block(length * self._block_size, self._block_size)
            if self._all_have_windows:
                # At the beginning of a chunk no block is read. The last one shows that the tokens
                # before it have been computed; elsewhere the group without a window shows it.
                start = min(start, length - 1)
            while first > start and self._has(index, request.block_hashes[first - 1], now):
                first -= 1
            if first <= start:
                return length
            first = length = first - 1  # a longer prefix would read the missing block
        return 0

    def _has(self, index: int, content: bytes, now: bool) -> bool:
        """Whether a group has a content, on the devices or in its second home."""
        if self._pools[index].find(content) is not None:
            return True
        tier = self._tier
        if tier is None:
            return False
        return tier.is_there(index, content) if now else tier.has(index, content)

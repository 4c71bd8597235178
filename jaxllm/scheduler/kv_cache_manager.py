"""Gives requests their KV blocks, and finds blocks that already hold the head of a prompt.

All bookkeeping is on the host. The device runs steps in the order in which they were dispatched,
so a block may be handed on as soon as its owner ends, even with a step under way that still
writes to it: whoever gets it writes later. For the same reason a block can be found by others
from the step after the one that fills it. Within one step it cannot, so registration comes after
all admissions of a step.
"""

import sys

from jaxllm.scheduler.block_pool import BlockPool
from jaxllm.scheduler.prefix_hash import block_hashes, group_root_hash, root_hash
from jaxllm.scheduler.request import Request

_HASH_STRIDE = 64  # blocks that a look-up hashes at a time


class KVCacheManager:
    """Block tables of running requests over one pool; `Request.block_ids` is such a table."""

    def __init__(self, *, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self._num_groups = 0

    def hash_root(self, cache_salt: str | None) -> bytes | None:
        """Return where a request's chain of hashes starts; None if it shares no blocks."""
        return root_hash(cache_salt) if self.enable_prefix_caching else None

    def group(self, leader: Request, follower: Request) -> None:
        """Let the follower find the leader's blocks, also when prefix caching is off."""
        if self.enable_prefix_caching:
            return
        if leader.hash_root is None:
            leader.hash_root = group_root_hash(self._num_groups)
            self._num_groups += 1
            if leader.block_ids:
                self._expect_next_block(leader)
                self.register(leader)
        follower.hash_root = leader.hash_root

    def may_read(self, request: Request) -> bool:
        """Whether a request may take over computed blocks, and need not compute all itself."""
        return request.hash_root is not None and not request.num_cache_bars

    def find_prefix(self, request: Request) -> list[int]:
        """Return the blocks that hold the longest known prefix of the request's tokens.

        The last token is never part of it: it must be computed for the next one to be sampled.
        """
        blocks: list[int] = []
        if not self.may_read(request):
            return blocks
        num_blocks = (request.num_known_tokens - 1) // self.block_size
        for index in range(num_blocks):
            if index == len(request.block_hashes):
                # Not all at once: after the first miss no more are needed for now.
                self._hash_blocks(request, min(index + _HASH_STRIDE, num_blocks))
            block = self.pool.find(request.block_hashes[index])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def admit(self, request: Request, prefix: list[int], reserve: int) -> bool:
        """Give a request the blocks for all its tokens, of which `prefix` holds the first ones.

        All at once, not chunk by chunk: prompts that are admitted together then cannot take each
        other's room half way. False, and nothing changes, if fewer than `reserve` blocks would
        stay free.
        """
        num_new = -(-request.num_tokens // self.block_size) - len(prefix)
        if num_new + reserve > self.pool.num_free - self.pool.count_free(prefix):
            return False
        self.pool.share(prefix)
        request.block_ids = prefix + self.pool.take(num_new)
        request.num_registered_blocks = len(prefix)
        request.has_taken_over_blocks = bool(prefix)
        self._expect_next_block(request)
        return True

    def grow(self, request: Request) -> bool:
        """Append one block to a request's table; False if none is free."""
        if not self.pool.num_free:
            return False
        request.block_ids += self.pool.take(1)
        return True

    def register(self, request: Request) -> None:
        """Let others find the request's full blocks, as far as their tokens are known."""
        if request.hash_root is None:
            return
        num_tokens = min(request.num_computed_tokens, request.num_known_tokens)
        first, end = request.num_registered_blocks, num_tokens // self.block_size
        if first < end:
            self._hash_blocks(request, end)
            self.pool.register(request.block_ids[first:end], request.block_hashes[first:end])
            request.num_registered_blocks = end
            self._expect_next_block(request)

    def free(self, request: Request) -> None:
        """Take the request's blocks back; those that are registered stay findable."""
        self.register(request)
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_registered_blocks = 0
        request.next_full_at = sys.maxsize

    def forget(self, request: Request) -> None:
        """Make every block that this request may have filled unfindable."""
        for content in request.block_hashes:
            self.pool.forget(content)

    def _hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Bring the request's hashes to so many blocks; each is computed once per request."""
        hashes, root = request.block_hashes, request.hash_root
        assert root is not None, request
        start, end = len(hashes) * self.block_size, num_blocks * self.block_size
        if start < end:
            tokens = request.known_tokens(start, end)
            hashes += block_hashes(hashes[-1] if hashes else root, tokens, self.block_size)

    def _expect_next_block(self, request: Request) -> None:
        if request.hash_root is not None:
            request.next_full_at = (request.num_registered_blocks + 1) * self.block_size

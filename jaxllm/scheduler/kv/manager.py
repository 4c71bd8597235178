"""Gives requests their KV blocks, and finds blocks that already hold the head of a prompt.

All bookkeeping is on the host. The device runs steps in the order of their dispatch. So a block may
pass to another request as soon as its owner no longer needs it, even while a step in flight still
reads or writes it: the new owner writes later. For the same reason other requests can find a block
from the step after the one that fills it. Within one step they cannot, so registration comes after
all admissions of a step.

Each group of layers has a pool of blocks, and a request has a table in each group. A request gives
a block of a group with a window back once none of its later tokens can read the block.

With a tier (`host_tier`), blocks have a second home on the host, and so have snapshots of states.
Of a prefix that is there, a request gets blocks of its own, which are filled before its first
chunk.
"""

import functools
import sys
from collections.abc import Iterable, Sequence

from jaxllm.cache_groups import CacheGroup, StateSnapshots
from jaxllm.lora.request import Adapter
from jaxllm.scheduler.kv.block_pool import BlockPool
from jaxllm.scheduler.kv.host_tier import HostTier
from jaxllm.scheduler.kv.prefix_hash import group_root_hash, root_hash
from jaxllm.scheduler.kv.prefix_search import PrefixSearch
from jaxllm.scheduler.kv.snapshots import Snapshots
from jaxllm.scheduler.kv.tables import BlockTable
from jaxllm.scheduler.request import Request


class KVCacheManager:
    """The pools of all groups, and the tables of all running requests in them."""

    def __init__(
        self,
        *,
        groups: Sequence[CacheGroup],
        block_size: int,
        enable_prefix_caching: bool,
        keeps_states: bool = False,
        tier: HostTier | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """With `keeps_states` the model has layers with a state of each request. Blocks do not have
        it, so a request takes over blocks only where a snapshot has the state at their end."""
        assert not keeps_states or enable_prefix_caching == (snapshots is not None), (
            "states are not in blocks"
        )
        self.groups = tuple(groups)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        # Whether requests can share a prefix at all.
        self.can_share = snapshots is not None or not keeps_states
        self.snapshots = None
        if snapshots is not None:
            self.snapshots = Snapshots(snapshots, block_size, tier, len(self.groups))
        assert tier is None or enable_prefix_caching, "the host has blocks by their hashes"
        self.tier = tier
        self._pools = tuple(
            BlockPool(
                group.num_blocks, None if tier is None else functools.partial(tier.offer, index)
            )
            for index, group in enumerate(groups)
        )
        self._search = PrefixSearch(self.groups, self._pools, block_size, tier)
        self._windowed = [i for i, group in enumerate(groups) if group.window is not None]
        self._num_sharing = 0
        # How often a request found too few free blocks, by group.
        self.num_shortages = [0] * len(self.groups)

    @property
    def num_blocks_used(self) -> list[int]:
        """Blocks that requests hold, by group."""
        return [pool.num_used for pool in self._pools]

    def hash_root(self, cache_salt: str | None, adapter: Adapter | None = None) -> bytes | None:
        """Return the root of a request's chain of hashes; None if it shares no blocks."""
        content = None if adapter is None else adapter.content
        return root_hash(cache_salt, content) if self.enable_prefix_caching else None

    def let_share(self, leader: Request, follower: Request) -> None:
        """Let the follower find the leader's blocks even if prefix caching is off."""
        assert self.can_share, "states are not in blocks"
        if self.enable_prefix_caching:
            return
        if leader.hash_root is None:
            leader.hash_root = group_root_hash(self._num_sharing)
            self._num_sharing += 1
            if leader.tables:
                self.advance(leader)
        follower.hash_root = leader.hash_root

    def may_read(self, request: Request) -> bool:
        """Whether a request may take over computed blocks."""
        return request.hash_root is not None and not request.num_cache_bars

    def find_prefix(self, request: Request, *, now: bool = True) -> int:
        """Return how many blocks at the head of the request need not be computed: every group has
        those of them that later tokens read. Without `now`, what is on its way to the host counts,
        and what would first be read from files.

        The last token is never among them: it must be computed to sample the next one.
        """
        if not self.may_read(request):
            return 0
        most = (request.num_known_tokens - 1) // self.block_size
        length = self._search.longest(request, most, now=now)
        if self.snapshots is None:
            return length
        end = length
        while (found := self.snapshots.find(request, length, now=now)) < length:
            length = self._search.longest(request, found, now=now)
        request.parts_at = end * self.block_size if length < end else 0
        return length

    def find_now(self, request: Request) -> int | None:
        """Return how many blocks of a prefix a request may be admitted with; None: it should wait
        for more, which are on their way to the host."""
        tier = self.tier
        if tier is None:
            return self.find_prefix(request)
        length = self.find_prefix(request, now=False)
        missing = [
            self._search.missing(request, index, length) for index in range(len(self.groups))
        ]
        if self.snapshots is not None:
            missing.append(self.snapshots.missing(request, length))
        # If these take most of a pool, others on their way might drive them out again and again.
        fits = all(
            2 * len(its) <= pool.num_places for its, pool in zip(missing, tier.pools, strict=True)
        )
        wanted = [(index, content) for index, its in enumerate(missing) for content in its]
        if not fits:
            return self.find_prefix(request)
        return length if tier.fetch(wanted) else None

    def missing_of_prompt(self, request: Request) -> list[tuple[int, bytes]]:
        """The contents of a prompt that no block has, by group; of its head as much as half of the
        host holds."""
        assert self.tier is not None
        most = min(pool.num_places // 2 for pool in self.tier.pools)
        length = min(most, (request.num_prompt_tokens - 1) // self.block_size)
        self._search.hash_blocks(request, length)
        groups = range(len(self.groups))
        return [(at, its) for at in groups for its in self._search.missing(request, at, length)]

    def admit(self, request: Request, num_prefix_blocks: int, reserve: int) -> bool:
        """Give a request blocks for all its tokens. The first `num_prefix_blocks` are shared, or
        filled from the host. In a group with a window it gets at most as many as it can hold at
        once.

        It gets them all at once, not chunk by chunk: otherwise prompts that are admitted together
        could take each other's room half way. Return False and change nothing if fewer than
        `reserve` blocks would stay free in a group, or there is no place for a snapshot.
        """
        snapshots = self.snapshots if num_prefix_blocks else None
        if snapshots is not None and not snapshots.has_room(request, num_prefix_blocks):
            return False
        length = -(-request.num_tokens // self.block_size)
        parts = []
        for index, (group, pool) in enumerate(zip(self.groups, self._pools, strict=True)):
            start = group.first_block(num_prefix_blocks * self.block_size, self.block_size)
            prefix = [pool.find(its) for its in request.block_hashes[start:num_prefix_blocks]]
            shared = [block for block in prefix if block is not None]
            assert self.tier is not None or len(shared) == num_prefix_blocks - start, (
                f"{request}: prefix is gone"
            )
            num_new = min(length, start + group.max_blocks_per_request) - start - len(shared)
            if num_new + reserve > pool.num_free - pool.count_free(shared):
                self.num_shortages[index] += 1
                return False
            parts.append((pool, start, prefix, shared, num_new))
        tables = []
        request.num_loaded_blocks = 0
        for index, (pool, start, prefix, shared, num_new) in enumerate(parts):
            pool.share(shared)
            if len(shared) == len(prefix):
                blocks = shared + pool.take(num_new)
            else:
                blocks = self._load(request, index, start, prefix, num_new)
            if request.gives_blocks:  # also those that it found on the devices
                contents = request.block_hashes[start:num_prefix_blocks]
                known = [
                    one for one, block in zip(contents, prefix, strict=True) if block is not None
                ]
                self._offer(request, len(tables), shared, known)
            tables.append(BlockTable(start, blocks))
        request.tables = tuple(tables)
        request.num_registered_blocks = num_prefix_blocks
        request.has_taken_over_blocks = num_prefix_blocks > 0
        request.room = min(table.end for table in tables) * self.block_size
        self._note_next_block(request)
        if snapshots is not None:
            snapshots.load(request, num_prefix_blocks)
        return True

    def _load(
        self,
        request: Request,
        index: int,
        start: int,
        prefix: list[int | None],
        num_new: int,
    ) -> list[int]:
        """Take new blocks in a group, and let those that the prefix lacks be filled from the host.
        Return the prefix and the other new blocks."""
        tier, pool = self.tier, self._pools[index]
        assert tier is not None
        missing = [
            content
            for content, block in zip(request.block_hashes[start:], prefix, strict=False)
            if block is None
        ]
        # Before new blocks are taken: what they held may drive these contents out.
        places = [tier.place_of(index, content) for content in missing]
        new = pool.take(num_new)
        filled = new[: len(missing)]
        for place, block in zip(places, filled, strict=True):
            tier.load(index, place, block)
        pool.register(filled, missing)
        request.num_loaded_blocks = max(request.num_loaded_blocks, len(missing))
        following = iter(filled)
        return [next(following) if its is None else its for its in prefix] + new[len(missing) :]

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Give a running request room for `num_tokens` tokens. Return False and change nothing if a
        group has too few free blocks."""
        end = -(-num_tokens // self.block_size)
        tables = request.tables
        for index, (pool, table) in enumerate(zip(self._pools, tables, strict=True)):
            if end - table.end > pool.num_free:
                self.num_shortages[index] += 1
                return False
        for pool, table in zip(self._pools, tables, strict=True):
            if end > table.end:
                table.append(pool.take(end - table.end))
        # It asked since some table was too short, and that one ends here now.
        request.room = end * self.block_size
        return True

    def fits(self, request: Request, num_tokens: int) -> bool:
        """Whether `extend` would find the blocks."""
        end = -(-num_tokens // self.block_size)
        pools = zip(self._pools, request.tables, strict=True)
        return all(end - table.end <= pool.num_free for pool, table in pools)

    def hash_blocks(self, request: Request, num_blocks: int) -> None:
        """Hash the request's first `num_blocks` blocks; each is hashed once per request."""
        self._search.hash_blocks(request, num_blocks)

    def advance(self, request: Request) -> None:
        """Register the request's full blocks whose tokens are known, and take back the blocks
        behind a window."""
        self._register(request)
        for index in self._windowed:
            table = request.tables[index]
            start = self.groups[index].first_block(request.num_certain_tokens, self.block_size)
            if start > table.start:
                self._pools[index].release(table.drop_until(start))
        self._note_next_block(request)

    def free(self, request: Request) -> None:
        """Take the request's blocks back. Registered blocks stay findable."""
        self._register(request)
        for pool, table in zip(self._pools, request.tables, strict=True):
            pool.release(table.blocks)
        if self.snapshots is not None:
            self.snapshots.drop(request)
        request.tables = ()
        request.room = 0
        request.num_registered_blocks = 0
        request.next_block_at = sys.maxsize

    def forget(self, request: Request) -> None:
        """Make every block that this request may have filled unfindable."""
        for index, pool in enumerate(self._pools):
            for content in request.block_hashes:
                pool.forget(content)
                if self.tier is not None:
                    self.tier.forget(index, content)
        if self.snapshots is not None:
            for content in request.block_hashes:
                self.snapshots.forget(content)

    def reset(self) -> bool:
        """Forget all prefixes, also those on the host. Does nothing and returns False while a
        request holds blocks."""
        if any(pool.num_used for pool in self._pools):
            return False
        if self.tier is not None:
            self.tier.reset()
        if self.snapshots is not None:
            self.snapshots.reset()
        return all([pool.reset() for pool in self._pools])

    def lose(self) -> None:
        """Forget what the devices had, since it is lost. No request holds blocks."""
        if self.tier is not None:
            self.tier.lose_coming()
        if self.snapshots is not None:
            self.snapshots.reset()
        forgotten = all([pool.reset() for pool in self._pools])
        assert forgotten, "blocks are in use, and no request runs"

    def check(self, running: Iterable[Request]) -> None:
        """Assert that blocks and tables add up. O(blocks)."""
        running = list(running)
        for index, (group, pool) in enumerate(zip(self.groups, self._pools, strict=True)):
            pool.check([request.tables[index].blocks for request in running])
            for request in running:
                table = request.tables[index]
                first = group.first_block(request.num_certain_tokens, self.block_size)
                assert table.start <= first, f"{request}: block {first} of group {index} is gone"
                assert table.num_sent <= table.end, f"{request}: group {index}"
                assert len(table.blocks) <= group.max_blocks_per_request, f"{request}: {index}"
        for request in running:
            ends = [table.end for table in request.tables]
            assert request.room == min(ends) * self.block_size, f"{request}: {ends}"
        if self.snapshots is not None:
            self.snapshots.check(running)
        if self.tier is not None:
            self.tier.check()

    def _register(self, request: Request) -> None:
        if request.hash_root is None:
            return
        num_tokens = min(request.num_certain_tokens, request.num_known_tokens)
        first, end = request.num_registered_blocks, num_tokens // self.block_size
        if first < end:
            self._search.hash_blocks(request, end)
            for index, (pool, table) in enumerate(zip(self._pools, request.tables, strict=True)):
                start = max(first, table.start)
                blocks = table.blocks[start - table.start : end - table.start]
                contents = request.block_hashes[start:end]
                pool.register(blocks, contents)
                self._offer(request, index, blocks, contents)
            request.num_registered_blocks = end
            if self.snapshots is not None:
                self.snapshots.register(request)

    def _offer(
        self, request: Request, index: int, blocks: Sequence[int], contents: Sequence[bytes]
    ) -> None:
        """Copy filled blocks to the host at once if others are to have them from there."""
        if self.tier is not None and (self.tier.is_eager or request.gives_blocks):
            for block, content in zip(blocks, contents, strict=False):
                self.tier.offer(index, block, content)

    def _note_next_block(self, request: Request) -> None:
        """Note at how many computed tokens `advance` has something to do."""
        at = sys.maxsize
        if request.hash_root is not None:
            at = (request.num_registered_blocks + 1) * self.block_size
        for index in self._windowed:
            last = self.groups[index].last_read(request.tables[index].start, self.block_size)
            at = min(at, last or at)
        request.next_block_at = at

"""The second home of KV blocks, behind the pools of the devices: on the host, and maybe on a disk.

A device block that is about to lose its content has it copied to the host before the step that
overwrites it, and a request that finds the content there gets it copied to a block of its own
before its first chunk. Both are *moves*, which run between steps in the order of dispatch, so a
plan may count on them as on a step. What a copy to the host has brought is known once the host has
read it; no step waits for that. Too many at once are dropped, and counted. Blocks of other engines
come to the host in the same way.
"""

from collections.abc import Sequence

import numpy as np

from jaxllm.handover.source import BlockSource
from jaxllm.scheduler.kv.host_pool import HostPool
from jaxllm.scheduler.schedule import BlockMoves, Mover


class HostTier:
    """The pools of all cache groups on the host, and the moves that the next step begins with.

    Snapshots of states are a group behind those of blocks: their places are its blocks, and a
    content is the hash of the prefix at whose end the state is.
    """

    def __init__(self, num_places: Sequence[int], mover: Mover, *, is_eager: bool = False) -> None:
        """If it is eager, blocks are copied when they are filled, and not when they are about to be
        overwritten, so that they are on a disk when the process ends."""
        self.pools = tuple(map(HostPool, num_places))
        self.is_eager = is_eager
        self.num_stored = self.num_loaded = self.num_read = self.num_dropped = 0  # blocks
        self.num_taken = self.num_not_taken = 0  # blocks of other engines
        self.num_arrived = 0  # of all kinds, also what has failed
        self._mover = mover
        self._number = 0  # of the next moves
        self._stores: list[tuple[int, int, int]] = []  # group, block, place
        self._contents: list[bytes] = []  # of the stores
        self._loads: list[tuple[int, int, int]] = []
        self._filled: set[tuple[int, int]] = set()  # group and block of the loads
        self._reads: list[tuple[int, int, bytes]] = []  # group, place, content
        self._takes: list[tuple[int, int, bytes, BlockSource]] = []

    @property
    def num_places(self) -> int:
        return sum(pool.num_places for pool in self.pools)

    @property
    def num_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    @property
    def num_given(self) -> int:
        """How many blocks other engines have got."""
        return self._mover.num_given

    @property
    def has_coming(self) -> bool:
        """Whether something is on its way to the host."""
        return any(pool.num_coming for pool in self.pools)

    def has(self, group: int, content: bytes) -> bool:
        """Whether a content can be had, now or soon. What comes from another engine does not count:
        only requests that have asked for it wait for that."""
        return self.pools[group].will_have(content) or self._mover.is_stored(group, content)

    def is_there(self, group: int, content: bytes) -> bool:
        """Whether a content can be loaded now. It is taken to be of use."""
        return self.pools[group].find(content) is not None

    def offer(self, group: int, block: int, content: bytes) -> None:
        """Copy a device block to the host, before the next step, unless the host has its content or
        too much is on its way. A block that a load of this step fills is read before that."""
        pool = self.pools[group]
        if (group, block) in self._filled:
            return
        if pool.find(content) is not None or pool.has(content):
            return
        place = pool.expect(content, self._number)
        if place is None:
            self.num_dropped += 1
            return
        self.num_stored += 1
        self._stores.append((group, block, place))
        self._contents.append(content)

    def load(self, group: int, place: int, block: int) -> None:
        """Copy what is at a place to a device block, before the next step. Its content may lose the
        place by then: loads are read before anything is written."""
        self.num_loaded += 1
        self._loads.append((group, block, place))
        self._filled.add((group, block))

    def place_of(self, group: int, content: bytes) -> int:
        """The place of a content that is there."""
        place = self.pools[group].find(content)
        assert place is not None, "the content is not there"
        return place

    def fetch(self, wanted: Sequence[tuple[int, bytes]]) -> bool:
        """Whether these contents, by group, are all there. If not, those that only have files are
        read, as far as there is room."""
        all_there = True
        for group, content in wanted:
            pool = self.pools[group]
            if pool.find(content) is not None:
                continue
            all_there = False
            if pool.has(content) or not self._mover.is_stored(group, content):
                continue
            place = pool.expect(content, self._number)
            if place is not None:
                self.num_read += 1
                self._reads.append((group, place, content))
        return all_there

    def is_coming(self, group: int, content: bytes) -> bool:
        return self.pools[group].is_coming(content)

    def ask(self, group: int, content: bytes, source: BlockSource) -> bool:
        """Let a content come from another engine, unless it is here or on its way. Return False if
        too much is on its way."""
        pool = self.pools[group]
        if pool.has(content):
            return True
        place = pool.expect(content, self._number, is_of_others=True)
        if place is None:
            return False
        self._takes.append((group, place, content, source))
        return True

    def take_moves(self) -> BlockMoves | None:
        """The moves to make before the next step; None: there are none."""
        if not (self._stores or self._loads or self._reads or self._takes):
            return None
        moves = BlockMoves(
            number=self._number,
            stores=np.array(self._stores, np.int32).reshape(-1, 3),
            contents=self._contents,
            loads=np.array(self._loads, np.int32).reshape(-1, 3),
            reads=self._reads,
            takes=self._takes,
        )
        self._number += 1
        self._stores, self._contents, self._loads, self._reads = [], [], [], []
        self._takes = []
        self._filled.clear()
        return moves

    def take_arrivals(self) -> None:
        """Take in what has come to the host, and which files other hosts have."""
        self._take_arrivals(wait=False)

    def await_arrivals(self) -> bool:
        """Send what is to be sent, and wait a moment for something to come: other engines may take
        long, and new requests must not wait for them. Return whether something has come."""
        self.send()
        return self.has_coming and self._take_arrivals(wait=True)

    def _take_arrivals(self, *, wait: bool) -> bool:
        arrivals = list(self._mover.arrived(wait=wait))
        self.num_arrived += len(arrivals)
        for number, group, content, ok, is_of_others in arrivals:
            self.pools[group].arrive(content, number, ok=ok)
            if is_of_others:
                self.num_taken += ok
                self.num_not_taken += not ok
            else:
                self.num_dropped += not ok
        return bool(arrivals)

    def send(self) -> None:
        """Make the moves now, since there is no step to begin with them."""
        moves = self.take_moves()
        if moves is not None:
            self._mover.send(moves)

    def forget(self, group: int, content: bytes) -> None:
        """Make a content unfindable, because it is not what its hash says."""
        self.pools[group].forget(content)
        kept = [
            (store, its)
            for store, its in zip(self._stores, self._contents, strict=True)
            if (store[0], its) != (group, content)
        ]
        self._stores, self._contents = [one for one, _ in kept], [one for _, one in kept]
        self._reads = [one for one in self._reads if (one[0], one[2]) != (group, content)]
        self._takes = [one for one in self._takes if (one[0], one[2]) != (group, content)]
        self._mover.forget(group, content)

    def lose_coming(self) -> None:
        """Forget all moves that have not ended, since the devices' caches are lost."""
        self.take_moves()
        for pool in self.pools:
            pool.lose_coming()

    def reset(self) -> None:
        """Forget everything, files too."""
        self.take_moves()
        for pool in self.pools:
            pool.reset()
        self._mover.forget_all()

    def check(self) -> None:
        """Assert the invariants. O(places)."""
        for pool in self.pools:
            pool.check()

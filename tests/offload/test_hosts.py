"""Ranks of an engine fill and load their parts of blocks in any order of arrivals, and the contents
are the same.

Each rank has the real mover in front of devices made of numpy, and a thread that makes what rank 0
sends, in order. A copy to the host ends when the test says so, on each rank by itself.
"""

import queue
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.offload.buffers import BLOCKS_PER_CALL, SNAPSHOTS_PER_CALL, Buffer
from jaxllm.offload.mover import BlockMover
from jaxllm.scheduler.kv.host_tier import HostTier

NUM_RANKS = 3
NUM_BLOCKS, NUM_SNAPSHOTS = 6, 3
PLACES = (8, 4)
WIDTH = 3  # numbers of a block
NUM_CONTENTS = 16  # more than devices and places hold, so that places pass on, too


def part(content, rank):
    """What a rank has of a block with this content; -1: nobody has written it."""
    return np.full(WIDTH, content * NUM_RANKS + rank, np.int32)


class Read:
    """What the devices have read, which can be had when its rank may go on."""

    def __init__(self, data, may_end):
        self.data, self.may_end = data, may_end

    @property
    def addressable_shards(self):
        self.may_end.acquire()
        return [SimpleNamespace(index=(slice(None),) * self.data.ndim, data=self.data)]


class Devices:
    """A stage with a cache of blocks, and one of snapshots."""

    def __init__(self):
        one = Mesh(np.array(jax.devices()[:1]), "x")
        self.arrays = [np.full((n, WIDTH), -1, np.int32) for n in (NUM_BLOCKS, NUM_SNAPSHOTS)]
        self.buffers = [
            Buffer(
                (0,),
                jax.ShapeDtypeStruct(
                    (count, 1, WIDTH), np.int32, sharding=NamedSharding(one, PartitionSpec())
                ),
            )
            for count in (BLOCKS_PER_CALL, SNAPSHOTS_PER_CALL)
        ]
        self.may_end = threading.Semaphore(0)

    def block_buffers(self, group):
        return (self.buffers[group],)

    def read_blocks(self, group, blocks):
        return (Read(self.arrays[group][blocks][:, None], self.may_end),)

    def write_blocks(self, group, blocks, data):
        self.arrays[group][blocks] = np.asarray(data[0])[:, 0]


class Rank:
    """A process of the engine. Rank 0 makes what it sends by itself."""

    def __init__(self, rank):
        self.rank = rank
        self.devices = Devices()
        offload = SimpleNamespace(places=PLACES)
        plan = SimpleNamespace(offload=offload, cache_groups=(None,), snapshots=object())
        self.mover = BlockMover(plan, [self.devices], None)
        self.sent = queue.SimpleQueue()
        self.error = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        if rank:
            self.mover.follow(lambda arrivals: None)
            self.thread.start()

    def make(self, moves, writes, expected):
        """A step: its moves, then what it writes to the devices, which then have these contents."""
        if moves is not None:
            self.mover.send(moves)
        for group, block, content in writes:
            self.devices.arrays[group][block] = part(content, self.rank)
        for array, contents in zip(self.devices.arrays, expected, strict=True):
            for block, content in enumerate(contents):
                if content is not None:
                    np.testing.assert_array_equal(array[block], part(content, self.rank))

    def run(self):
        while (step := self.sent.get()) is not None:
            try:
                self.make(*step)
            except BaseException as error:
                self.error = error
                return

    def end(self):
        self.devices.may_end.release(1_000_000)
        if self.rank:
            self.sent.put(None)
            self.thread.join(60)
            assert not self.thread.is_alive(), f"rank {self.rank} waits for ever"
        self.mover.close()
        if self.error is not None:
            raise self.error


class Hosts:
    """Rank 0's view of the ranks: what it plans, and what their devices have then."""

    def __init__(self):
        self.ranks = [Rank(rank) for rank in range(NUM_RANKS)]
        self.tier = HostTier(PLACES, self.ranks[0].mover)
        self.contents = [[None] * n for n in (NUM_BLOCKS, NUM_SNAPSHOTS)]  # of the devices
        self.num_loaded = 0

    def step(self, chosen):
        """Blocks pass on to contents: from the host if these are there, else computed."""
        self.tier.take_arrivals()
        writes = []
        for group, block, content in chosen:
            its = self.contents[group]
            if content in its:
                continue
            place = self.tier.pools[group].find(name(content))
            if its[block] is not None:
                self.tier.offer(group, block, name(its[block]))
            if place is None:
                writes.append((group, block, content))
            else:
                self.tier.load(group, place, block)
                self.num_loaded += 1
            its[block] = content
        self.tier.check()
        self.send(writes)

    def send(self, writes):
        moves = self.tier.take_moves()
        expected = [list(its) for its in self.contents]
        for one in self.ranks[1:]:
            one.sent.put((moves, writes, expected))
        self.ranks[0].make(moves, writes, expected)

    def forget(self, group, content):
        self.tier.forget(group, name(content))
        its = self.contents[group]
        if content in its:
            its[its.index(content)] = None

    def end(self):
        for one in self.ranks:
            one.end()


def name(content):
    return content.to_bytes(32, "big")


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 8))]
)
@pytest.mark.parametrize("quickest", range(NUM_RANKS))
def test_any_order_of_arrivals_gives_the_same_contents(quickest, seed):
    rng = np.random.default_rng([quickest, seed])
    hosts = Hosts()
    for _ in range(200):
        blocks = [(0, block) for block in range(NUM_BLOCKS)]
        blocks += [(1, block) for block in range(NUM_SNAPSHOTS)]
        chosen = rng.permutation(blocks)[: rng.integers(1, 5)].tolist()
        hosts.step([(group, block, int(rng.integers(NUM_CONTENTS))) for group, block in chosen])
        if rng.random() < 0.05:
            hosts.forget(int(rng.integers(2)), int(rng.integers(NUM_CONTENTS)))
        for one in hosts.ranks:
            # Copies of some steps end at once, and those of others much later.
            if rng.random() < (0.9 if one.rank == quickest else 0.3):
                one.devices.may_end.release(int(rng.integers(1, 6)))
        time.sleep(0.001)  # for the threads that may go on
    hosts.end()
    assert hosts.num_loaded > 20, hosts.num_loaded

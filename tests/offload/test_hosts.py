"""Ranks of an engine fill and load their parts of blocks in any order of arrivals, lose files and
start again, and the contents are the same.

Each rank has the real mover and real files, in front of devices made of numpy, and a thread that
makes what rank 0 sends, in order. A copy to the host ends when the test says so, on each rank by
itself, and rank 0 hears of it later.
"""

import contextlib
import functools
import queue
import shutil
import threading
import time
from collections import Counter
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.executor.mover_over_hosts import MoverOverHosts, files_report_of, report_of
from jaxllm.executor.wire import (
    Arrived,
    FilesChanged,
    ForgetBlock,
    ForgetBlocks,
    decode_from_leader,
    decode_to_leader,
    encode,
)
from jaxllm.offload.block_files import BlockFiles
from jaxllm.offload.buffers import BLOCKS_PER_CALL, SNAPSHOTS_PER_CALL, Buffer
from jaxllm.offload.mover import BlockMover
from jaxllm.scheduler.kv.host_tier import HostTier

NUM_RANKS = 3
NUM_BLOCKS, NUM_SNAPSHOTS = 6, 3
PLACES = (12, 8)
WIDTH = 3  # numbers of a block
NUM_CONTENTS = 24  # more than devices and places hold, so that places pass on, too
# Of files, so that the ranks drop others, and at other times.
MOST_BYTES = (40 * 142, 1 << 20, 24 * 142)
MANY = 1000  # copies: more than are under way at once


def part(content, version, rank):
    """What a rank has of a block with this content; -1: nobody has written it. What is forgotten
    comes back as another version."""
    return np.full(WIDTH, (version * NUM_CONTENTS + content) * NUM_RANKS + rank, np.int32)


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

    def __init__(self, rank, directory, report):
        self.rank = rank
        self.devices = Devices()
        offload = SimpleNamespace(places=PLACES)
        plan = SimpleNamespace(offload=offload, cache_groups=(None,), snapshots=object())
        files = None
        if directory is not None:
            files = BlockFiles(directory, b"model %d" % rank, MOST_BYTES[rank])
        self.mover = BlockMover(plan, [self.devices], files)
        self.sent = queue.SimpleQueue()
        self.error = None
        self.thread = threading.Thread(target=self.run, daemon=True)
        if rank:
            self.mover.follow(lambda arrivals: report(report_of(rank, 0, arrivals)))
            found = self.mover.follow_files(
                lambda changes: report(files_report_of(rank, 0, changes))
            )
            report(FilesChanged(rank, 0, found, []))
            self.thread.start()

    def make(self, moves, writes, expected):
        """A step: its moves, then what it writes to the devices, which then have these contents."""
        if moves is not None:
            self.mover.send(moves)
        for group, block, content in writes:
            self.devices.arrays[group][block] = part(*content, self.rank)
        for array, contents in zip(self.devices.arrays, expected, strict=True):
            for block, content in enumerate(contents):
                if content is not None:
                    np.testing.assert_array_equal(array[block], part(*content, self.rank))

    def run(self):
        while (step := self.sent.get()) is not None:
            try:
                if callable(step):
                    step()
                elif isinstance(step, bytes):
                    self.obey(decode_from_leader(step))
                else:
                    self.make(*step)
            except BaseException as error:
                self.error = error
                return

    def obey(self, message):
        match message:
            case ForgetBlock():
                self.mover.forget(message.group, message.content)
            case ForgetBlocks():
                self.mover.begin_to_forget_all()

    def settle(self):
        """Let all end that has been sent."""
        self.devices.may_end.release(MANY)
        done = threading.Event()
        if self.rank:
            self.sent.put(None)
            self.thread.join(60)
            assert not self.thread.is_alive(), f"rank {self.rank} waits for ever"
        self.mover._work.put(done.set)
        assert done.wait(60), f"the mover of rank {self.rank} waits for ever"
        if self.error is not None:
            raise self.error

    def end(self, *, is_killed=False):
        """End with files of all blocks, or before some are written."""
        self.settle()
        if is_killed:
            self.mover._work.put(self.mover._unwritten.clear)
        self.mover.close()


class Wire:
    """What ranks report to rank 0, in the order of each. It is under way until `deliver`."""

    def __init__(self):
        self.under_way = [queue.SimpleQueue() for _ in range(NUM_RANKS)]
        self.reports = []
        self.on_wait = lambda: None

    def report(self, rank, report):
        if report is not None:
            self.under_way[rank].put(encode(report))

    def deliver(self, rank, count):
        its = self.under_way[rank]
        while count and not its.empty():
            self.reports.append(decode_to_leader(its.get()))
            count -= 1

    def take(self, kind):
        found = [one for one in self.reports if isinstance(one, kind)]
        self.reports = [one for one in self.reports if not isinstance(one, kind)]
        return found

    def take_arrived(self, replica, wait_s):
        return self.take(Arrived)

    def take_files(self, replica):
        return self.take(FilesChanged)

    def take_in(self):
        self.on_wait()


class Counting(MoverOverHosts):
    """Counts the reads that have come, and the others."""

    def __init__(self, *args):
        super().__init__(*args)
        self.reads = set()
        self.ends = Counter()

    def expect(self, moves):
        super().expect(moves)
        self.reads |= {(moves.number, group, content) for group, _, content in moves.reads}

    def arrived(self, *, wait=False):
        found = super().arrived(wait=wait)
        for number, group, content, ok, _ in found:
            if (number, group, content) not in self.reads:
                continue
            self.ends[ok] += 1
            coming = self.pools[group]._coming.get(content)
            if not ok and coming is not None and coming.number == number:  # it is not forgotten
                assert not self.is_stored(group, content), "it would be read again"
        return found


class Hosts:
    """Rank 0's view of the ranks: what it plans, and what their devices have then."""

    def __init__(self, directory=None):
        self.directory = directory
        self.versions = Counter()
        self.num_loaded = 0
        self.reads = Counter()
        self.start()

    def start(self):
        self.wire = Wire()
        self.ranks = [
            Rank(
                rank,
                None if self.directory is None else self.directory / str(rank),
                functools.partial(self.wire.report, rank),
            )
            for rank in range(NUM_RANKS)
        ]
        for rank in range(1, NUM_RANKS):
            self.wire.deliver(rank, 1)  # which files there are
        others = range(1, NUM_RANKS)
        self.over = Counting(self.tell, self.wire, 0, others, self.ranks[0].mover)
        self.tier = HostTier(PLACES, self.over, is_eager=self.directory is not None)
        self.over.pools = self.tier.pools
        self.contents = [[None] * n for n in (NUM_BLOCKS, NUM_SNAPSHOTS)]  # of the devices

    def tell(self, message):
        for one in self.ranks[1:]:
            one.sent.put(encode(message))

    def current(self, group, number):
        return number, self.versions[group, number]

    def step(self, chosen, waits):
        """Blocks pass on to contents: from the host if these are there, else computed, or, if
        they have files, read first."""
        self.tier.take_arrivals()
        writes = []
        for (group, block, number), wait in zip(chosen, waits, strict=True):
            its, content = self.contents[group], self.current(group, number)
            if content in its:
                continue
            found = self.tier.fetch([(group, name(number))])
            if not found and wait and self.tier.has(group, name(number)):
                continue
            if its[block] is not None:
                self.tier.offer(group, block, name(its[block][0]))
            # A request may be admitted with what has lost its place by now.
            if found and self.tier.is_there(group, name(number)):
                self.tier.load(group, self.tier.place_of(group, name(number)), block)
                self.num_loaded += 1
            else:
                writes.append((group, block, content))
            its[block] = content
        self.tier.check()
        self.send(writes)
        if self.tier.is_eager:  # what this step has filled is copied before the next one
            for group, block, _ in writes:
                self.tier.offer(group, block, name(self.contents[group][block][0]))

    def send(self, writes=()):
        moves = self.tier.take_moves()
        if moves is not None:
            self.over.expect(moves)
        expected = [list(its) for its in self.contents]
        for one in self.ranks[1:]:
            one.sent.put((moves, writes, expected))
        self.ranks[0].make(moves, writes, expected)

    def forget(self, group, number):
        self.tier.forget(group, name(number))
        its, content = self.contents[group], self.current(group, number)
        if content in its:
            its[its.index(content)] = None
        self.versions[group, number] += 1

    def reset(self):
        # Copies under way end when all ranks have heard of it.
        self.wire.on_wait = self.let_end
        self.tier.reset()
        for group, its in enumerate(self.contents):
            its[:] = [None] * len(its)
            for number in range(NUM_CONTENTS):
                self.versions[group, number] += 1
        self.check_gone(self.versions)

    def let_end(self):
        for one in self.ranks:
            one.devices.may_end.release(MANY)

    def check_gone(self, contents):
        """Let all end that is under way. No rank has files of contents that are forgotten."""
        self.let_end()
        for one in self.ranks:
            done = threading.Event()
            one.sent.put(lambda one=one, done=done: one.mover._work.put(done.set))
            if not one.rank:
                one.sent.get()()
            assert done.wait(60)
            until = time.monotonic() + 60
            while one.mover._unwritten and time.monotonic() < until:
                time.sleep(0.001)
            for group, number in contents:
                assert not one.mover._files.has(group, name(number)), (one.rank, group, number)
            one.devices.may_end = threading.Semaphore(0)

    def end(self, killed=()):
        for one in self.ranks:
            one.end(is_killed=one.rank in killed)
        self.reads += self.over.ends

    def read_all(self):
        """Everything that seems to be in files comes, or turns out to be gone, at once."""
        self.send()
        self.let_end()
        for group, number in self.versions.keys() | {(0, 0)}:
            key = group, name(number)
            reads, until = self.tier.num_read, time.monotonic() + 60
            while self.tier.has(*key) and not self.tier.fetch([key]):
                assert self.tier.num_read <= reads + 1, "it is read again and again"
                self.send()
                for rank in range(1, NUM_RANKS):
                    self.wire.deliver(rank, -1)
                self.tier.take_arrivals()
                assert time.monotonic() < until, "a read does not end"


def name(number):
    return number.to_bytes(32, "big")


def drive(hosts, rng, quickest, num_steps, may_forget=0.05, may_reset=0.0):
    for _ in range(num_steps):
        blocks = [(0, block) for block in range(NUM_BLOCKS)]
        blocks += [(1, block) for block in range(NUM_SNAPSHOTS)]
        chosen = rng.permutation(blocks)[: rng.integers(1, 5)].tolist()
        chosen = [(group, block, int(rng.integers(NUM_CONTENTS))) for group, block in chosen]
        hosts.step(chosen, rng.random(len(chosen)) < 0.7)
        if rng.random() < may_reset:
            hosts.reset()
        if rng.random() < may_forget:
            forgotten = int(rng.integers(2)), int(rng.integers(NUM_CONTENTS))
            hosts.forget(*forgotten)
            if hosts.directory is not None and rng.random() < 0.5:
                hosts.check_gone([forgotten])
        for one in hosts.ranks:
            # Copies of some steps end at once, and those of others much later.
            if rng.random() < (0.9 if one.rank == quickest else 0.3):
                one.devices.may_end.release(int(rng.integers(1, 6)))
            hosts.wire.deliver(one.rank, int(rng.choice([0, 1, 2, 3, 8])))
        time.sleep(0.001)  # for the threads that may go on


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 8))]
)
@pytest.mark.parametrize("quickest", range(NUM_RANKS))
def test_any_order_of_arrivals_gives_the_same_contents(quickest, seed):
    hosts = Hosts()
    drive(hosts, np.random.default_rng([quickest, seed]), quickest, 150)
    hosts.end()
    assert hosts.num_loaded > 20, hosts.num_loaded


# How often something is forgotten, or all of it, in the turns between restarts.
MAY = ((0.0, 0.0), (0.3, 0.0), (0.0, 0.0), (0.1, 0.05))


def spoil(path, rng):
    """Damage a file, or remove it."""
    data = bytearray(path.read_bytes())
    match rng.integers(4):
        case 0:
            path.unlink()
        case 1:
            path.write_bytes(data[:-5])
        case _:  # one of the numbers
            data[-33 - int(rng.integers(4 * WIDTH))] ^= 1
            path.write_bytes(data)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 16))]
)
def test_a_block_comes_from_files_only_if_every_rank_can_read_its_own(seed, tmp_path):
    rng = np.random.default_rng(seed)
    hosts = Hosts(tmp_path)
    for turn in range(4):
        for _ in range(3):
            drive(hosts, rng, turn % NUM_RANKS, 20, *MAY[turn])
            # Behind the back of the rank that knows of it, and of rank 0.
            files = sorted((tmp_path / str(rng.integers(NUM_RANKS))).glob("*.kv"))
            for index in rng.permutation(len(files))[:3]:
                with contextlib.suppress(FileNotFoundError):  # it has just given way
                    spoil(files[index], rng)
        hosts.end(killed={int(rng.integers(NUM_RANKS))})
        if turn == 2:
            shutil.rmtree(tmp_path / "1")
        hosts.start()
        if turn == 2:
            assert not any(hosts.tier.has(0, name(number)) for number in range(NUM_CONTENTS))
    hosts.read_all()
    hosts.end()
    assert hosts.num_loaded > 20 and hosts.reads[True] > 8 and hosts.reads[False], hosts.reads

"""Moves blocks between the devices and the host's memory, for one replica.

The engine's thread dispatches; a thread of the mover waits for the devices, copies what they have
read to its place, and reads files. It does one thing after the other, in the order in which moves
were sent, so a place that passes on to another content is written last for that. What comes from
other engines comes when it does, and is written only if its place is still waiting for it.

Over several hosts each rank has a mover for its devices' parts of the blocks. All make the same
moves in the same order, and each reports what has arrived, and which files it has.
"""

import atexit
import contextlib
import functools
import math
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from jaxllm.ending import WRITING_S
from jaxllm.handover.source import BlockSource
from jaxllm.logging import init_logger
from jaxllm.offload.block_files import BlockFiles
from jaxllm.offload.buffers import Buffer, blocks_per_call
from jaxllm.offload.host_blocks import HostBlocks
from jaxllm.offload.inventory import Inventory
from jaxllm.plan.engine_plan import EnginePlan
from jaxllm.runner.stage import Stage
from jaxllm.scheduler.schedule import Arrival, BlockKey, BlockMoves

logger = init_logger(__name__)

_MOMENT_S = 0.05
# A file that is begun in time may take so much longer.
_LAST_FILE_S = 1.0

# The movers with files whose engines have not been shut down.
_open: "set[BlockMover]" = set()


class Others(Protocol):
    """Engines that blocks are taken from."""

    def ask(
        self,
        source: BlockSource,
        group: int,
        content: bytes,
        taken: Callable[[list[Any] | None], None],
    ) -> None:
        """Ask for a block. `taken` is called once, in another thread, with its arrays as bytes, or
        with None."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Pool:
    """The blocks of a cache group on the host, or the snapshots of states."""

    blocks_per_call: int
    stages: list[tuple[Stage, tuple[Buffer, ...]]]  # those with caches of the group
    blocks: list[list[HostBlocks]]  # by stage and buffer

    def parts(self, place: int) -> list[np.ndarray]:
        """The arrays of the block at a place."""
        return [one.array[place] for its in self.blocks for one in its]


@dataclass(slots=True)
class _Copy:
    """Blocks of a group that the devices read in one call."""

    group: int
    places: list[int]
    contents: list[bytes]
    arrays: list[tuple[jax.Array, ...]]  # by stage


@dataclass(slots=True)
class _Work:
    """What the thread does for one call of `send`."""

    moves: BlockMoves
    copies: list[_Copy] = field(default_factory=list)


@atexit.register
def write_all() -> None:
    """Write what has no file yet, or a while, of all engines of a process that have not been shut
    down, as it ends."""
    movers = list(_open)
    for mover in movers:
        mover.begin_to_close()
    for mover in movers:
        mover.close()


class BlockMover:
    """The host's memory for blocks, and the thread that fills it."""

    def __init__(
        self,
        plan: EnginePlan,
        stages: Sequence[Stage],
        files: BlockFiles | None,
        others: Others | None = None,
    ):
        """`others` are the engines that blocks are taken from."""
        assert (offload := plan.offload) is not None
        self._files = files
        self._others = others
        self._inventory = Inventory()
        self.num_given = 0
        self._pools = [
            _make_pool(stages, group, num_places, blocks_per_call(plan, group))
            for group, num_places in enumerate(offload.places)
        ]
        self._work: queue.SimpleQueue[_Work | Callable[[], None] | None] = queue.SimpleQueue()
        self._arrivals: queue.SimpleQueue[list[Arrival]] = queue.SimpleQueue()
        self._tell: Callable[[list[Arrival]], None] = self._arrivals.put
        self._tell_files: Callable[[dict[BlockKey, bool]], None] = lambda changes: None
        # Blocks that have no file yet, by group and place; a place that passes on loses its turn.
        self._unwritten: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._num_pending = 0  # sent, and not taken as arrivals
        self._write_until = math.inf  # until the end
        self._thread = threading.Thread(target=self._run, name="kv-blocks", daemon=True)
        self._thread.start()
        if files is not None:
            _open.add(self)

    def send(self, moves: BlockMoves) -> None:
        """Dispatch moves, behind all steps that have been dispatched. Does not wait."""
        work = _Work(moves)
        self._num_pending += 1 + len(moves.takes)
        try:
            loads = [
                (group, blocks, self._take(group, places))
                for _, group, blocks, places in self._calls(moves.loads)
            ]
            self._read_on_devices(work)
            for group, blocks, data in loads:
                for stage, its in zip(self._stages(group), data, strict=True):
                    stage.write_blocks(group, self._padded(group, blocks), its)
        finally:
            self._work.put(work)  # also what was not dispatched is to be told

    def follow(self, tell: Callable[[list[Arrival]], None]) -> None:
        """Report what each call of `send` has brought, from the mover's thread, in place of
        `arrived`. Nothing may have been sent."""
        self._tell = tell

    def follow_files(self, tell: Callable[[dict[BlockKey, bool]], None]) -> list[BlockKey]:
        """Return the blocks that have files. From now on report from the mover's thread which
        others get or lose theirs, and before an arrival that could not be read. Nothing may have
        been sent."""
        if self._files is None:
            return []
        self._tell_files = tell
        return self._files.follow()

    def arrived(self, *, wait: bool = False) -> Iterator[Arrival]:
        """Return what has come to the host since the last call; with `wait`, wait a moment for
        something that is on its way."""
        assert self._num_pending or not wait, "nothing is on its way"
        with contextlib.suppress(queue.Empty):
            while True:
                arrivals = self._arrivals.get(block=wait, timeout=_MOMENT_S)
                wait = False
                self._num_pending -= 1
                yield from arrivals

    def is_stored(self, group: int, content: bytes) -> bool:
        """Whether there is a file of a content."""
        return self._files is not None and self._files.has(group, content)

    def look_up(
        self, group: int, content: bytes, answer: Callable[[list[bytes] | None], None]
    ) -> None:
        """Call back from the mover's thread, with copies of a block's arrays, or with None. It is
        behind all that has been sent. Any thread may call this."""
        self._work.put(lambda: answer(self._copy_of(group, content)))

    def forget(self, group: int, content: bytes) -> None:
        """Give a content to nobody, and remove its file, if there is one."""
        self._work.put(lambda: self._inventory.forget(group, content))
        if (files := self._files) is not None:
            files.bar(group, content)
            self._work.put(lambda: self._remove(files, group, content))

    def forget_all(self) -> None:
        """Give nothing to anybody, and remove all files."""
        self.begin_to_forget_all().wait()

    def begin_to_forget_all(self) -> threading.Event:
        """The same, without waiting for the end, which the event tells."""
        done = threading.Event()
        self._work.put(self._inventory.forget_all)
        if (files := self._files) is None:
            done.set()
            return done

        def remove() -> None:
            self._unwritten.clear()
            files.remove_all()
            done.set()

        self._work.put(remove)
        return done

    def close(self) -> None:
        """End the thread, after it has written the files that it has to write, or a while. The
        thread may wait for a device that never answers, so nothing waits for it any longer."""
        self.begin_to_close()
        self._thread.join(max(0.0, self._write_until - time.monotonic()) + _LAST_FILE_S)
        _open.discard(self)

    def begin_to_close(self) -> None:
        """Let the thread end, and do not wait: several movers end together. No move may follow."""
        if self._write_until < math.inf:
            return
        self._write_until = time.monotonic() + WRITING_S
        if self._others is not None:
            self._others.close()
        self._work.put(None)

    def _read_on_devices(self, work: _Work) -> None:
        """Dispatch the stores. What fails is not stored, and costs nothing else."""
        moves = work.moves
        try:
            for indices, group, blocks, places in self._calls(moves.stores):
                padded = self._padded(group, blocks)
                arrays = [stage.read_blocks(group, padded) for stage in self._stages(group)]
                contents = [moves.contents[index] for index in indices]
                work.copies.append(_Copy(group, places, contents, arrays))
        except Exception:
            logger.exception("blocks cannot be copied to the host")

    def _stages(self, group: int) -> list[Stage]:
        return [stage for stage, _ in self._pools[group].stages]

    def _take(self, group: int, places: list[int]) -> list[list[Any]]:
        """Copy blocks from their places, for each stage."""
        pool, padded = self._pools[group], self._padded(group, places)
        return [[one.take(padded) for one in its] for its in pool.blocks]

    def _calls(self, moves: np.ndarray) -> Iterator[tuple[list[int], int, list[int], list[int]]]:
        """The calls of a program that make moves: their indices, the group, device blocks, and
        places on the host."""
        for group in dict.fromkeys(moves[:, 0].tolist()):
            its, size = np.flatnonzero(moves[:, 0] == group), self._pools[group].blocks_per_call
            for first in range(0, len(its), size):
                some = its[first : first + size]
                yield some.tolist(), group, moves[some, 1].tolist(), moves[some, 2].tolist()

    def _padded(self, group: int, numbers: list[int]) -> np.ndarray:
        padded = np.full(self._pools[group].blocks_per_call, numbers[-1], np.int32)
        padded[: len(numbers)] = numbers
        return padded

    def _run(self) -> None:
        while True:
            try:
                # Files are written while there is nothing else to do.
                work = self._work.get(block=not self._unwritten)
            except queue.Empty:
                self._write_one()
                continue
            if work is None:
                break
            if isinstance(work, _Work):
                self._note_places(work.moves)
                arrivals = self._copies(work) + self._reads(work.moves)
                self._report_files()
                self._tell(arrivals)
                self._ask_others(work.moves)
            else:
                work()
                self._report_files()
        while self._unwritten and time.monotonic() < self._write_until:
            self._write_one()
        if self._unwritten:
            logger.warning("the time is over: %d blocks get no file", len(self._unwritten))

    def _write_one(self) -> None:
        """Write the file of the block that has waited for longest."""
        assert self._files is not None
        (group, place), content = self._unwritten.popitem(last=False)
        self._files.write(group, content, self._pools[group].parts(place))
        self._report_files()

    def _report_files(self) -> None:
        if self._files is not None and (changes := self._files.take_changes()):
            self._tell_files(changes)

    def _remove(self, files: BlockFiles, group: int, content: bytes) -> None:
        for key, its in list(self._unwritten.items()):
            if its == content and key[0] == group:
                del self._unwritten[key]
        files.remove(group, content)

    def _note_places(self, moves: BlockMoves) -> None:
        """Note which places pass on."""
        stores = [
            (group, place, content)
            for (group, _, place), content in zip(
                moves.stores.tolist(), moves.contents, strict=True
            )
        ]
        takes = [take[:3] for take in moves.takes]
        for group, place, content in [*stores, *moves.reads, *takes]:
            self._inventory.await_content(group, place, moves.number, content)
            self._unwritten.pop((group, place), None)

    def _ask_others(self, moves: BlockMoves) -> None:
        for group, place, content, source in moves.takes:
            assert self._others is not None, "the plan takes no blocks"
            take_in = functools.partial(self._take_in, moves.number, group, place, content)
            self._others.ask(
                source,
                group,
                content,
                lambda parts, take_in=take_in: self._work.put(functools.partial(take_in, parts)),
            )

    def _take_in(
        self, number: int, group: int, place: int, content: bytes, given: list[Any] | None
    ) -> None:
        """Put what another engine has given to its place, if that still waits for it."""
        parts = self._pools[group].parts(place)
        ok = (
            given is not None
            and self._inventory.awaits(group, place, number, content)
            and [memoryview(its).nbytes for its in given] == [part.nbytes for part in parts]
        )
        if ok and given is not None:
            for part, its in zip(parts, given, strict=True):
                part.reshape(-1).view(np.uint8)[:] = np.frombuffer(its, np.uint8)
            self._inventory.put(group, place, number, content)
        self._tell([Arrival(number, group, content, ok, is_of_others=True)])

    def _copy_of(self, group: int, content: bytes) -> list[bytes] | None:
        place = self._inventory.find(group, content)
        if place is None:
            return None
        self.num_given += 1
        return [part.tobytes() for part in self._pools[group].parts(place)]

    def _copies(self, work: _Work) -> list[Arrival]:
        """Wait for the devices, and copy what they have read."""
        number, arrivals = work.moves.number, []
        for copy in work.copies:
            try:
                self._fill(copy)
                ok = True
            except Exception as error:
                ok = False
                logger.warning("%d blocks do not come to the host: %s", len(copy.places), error)
            copy.arrays = []
            arrivals += [Arrival(number, copy.group, its, ok) for its in copy.contents]
            for place, content in zip(copy.places, copy.contents, strict=True) if ok else ():
                self._inventory.put(copy.group, place, number, content)
                if self._files is not None:
                    self._unwritten[copy.group, place] = content
        told = {(its.group, its.content) for its in arrivals}
        for (group, _, _), content in zip(
            work.moves.stores.tolist(), work.moves.contents, strict=True
        ):
            if (group, content) not in told:  # it was not dispatched
                arrivals.append(Arrival(number, group, content, False))
        return arrivals

    def _fill(self, copy: _Copy) -> None:
        for blocks, buffers in zip(self._pools[copy.group].blocks, copy.arrays, strict=True):
            for its, buffer in zip(blocks, buffers, strict=True):
                its.fill(copy.places, buffer)

    def _reads(self, moves: BlockMoves) -> list[Arrival]:
        arrivals = []
        for group, place, content in moves.reads:
            assert self._files is not None
            ok = self._files.read(group, content, self._pools[group].parts(place))
            if ok:
                self._inventory.put(group, place, moves.number, content)
            arrivals.append(Arrival(moves.number, group, content, ok))
        return arrivals


def _make_pool(stages: Sequence[Stage], group: int, num_places: int, blocks_per_call: int) -> _Pool:
    its = [(stage, buffers) for stage in stages if (buffers := stage.block_buffers(group))]
    blocks = [[HostBlocks(num_places, one.shape) for one in buffers] for _, buffers in its]
    return _Pool(blocks_per_call, its, blocks)

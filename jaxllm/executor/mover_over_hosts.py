"""The second home of a replica's blocks over several hosts: what is there is there on every rank.

Every rank moves its part of each block in the order in which rank 0 sends the moves, and reports
each that it has ended. A block has come when all ranks have their parts, so a load never waits for
a rank that is late, and a block that one rank could not copy or read has not come.

A block has files if every rank has one of its part. Each rank reports which it has at the start,
and then which it has written or lost. A file may be gone before rank 0 learns of it: then that
rank cannot read it, and the block does not come. A rank reports the loss first, so nothing asks
for the file again.
"""

import queue
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxllm.executor.wire import (
    Arrived,
    FilesChanged,
    ForgetBlock,
    ForgetBlocks,
    FromLeader,
    Move,
)
from jaxllm.offload.mover import BlockMover
from jaxllm.scheduler.schedule import Arrival, BlockKey, BlockMoves

# How long rank 0 waits for blocks when there is nothing else to do, and, where it waits for its own
# thread, before it checks whether the other ranks live.
_MOMENT_S = 0.05


class Reports(Protocol):
    """What the other ranks report."""

    def take_arrived(self, replica: int, wait_s: float) -> Sequence[Arrived]: ...

    def take_files(self, replica: int) -> Sequence[FilesChanged]: ...

    def take_in(self) -> None:
        """Take in all reports; raise if a rank is lost."""
        ...


@dataclass(slots=True)
class _Awaited:
    """Moves that have not ended on some ranks."""

    blocks: list[BlockKey]  # that they bring to the host
    ranks: set[int]
    failed: set[BlockKey]  # on one rank at least


def report_of(rank: int, replica: int, arrivals: Sequence[Arrival]) -> Arrived | None:
    """What a rank reports of one call of its mover; None: nothing was to come."""
    if not arrivals:
        return None
    failed = [(its.group, its.content) for its in arrivals if not its.ok]
    return Arrived(rank, replica, arrivals[0].number, failed)


def files_report_of(rank: int, replica: int, changes: Mapping[BlockKey, bool]) -> FilesChanged:
    """What a rank reports of its files: whether blocks have one now."""
    gained = [key for key, has_file in changes.items() if has_file]
    lost = [key for key, has_file in changes.items() if not has_file]
    return FilesChanged(rank, replica, gained, lost)


class MoverOverHosts:
    """The movers of a replica's ranks, seen from rank 0."""

    num_given = 0

    def __init__(
        self,
        tell: Callable[[FromLeader], None],
        reports: Reports,
        replica: int,
        others: Sequence[int],
        own: BlockMover | None,
    ):
        """`tell` sends a message to the ranks beside rank 0. Rank 0's own mover is None if it has
        no device of the replica."""
        self._tell = tell
        self._reports = reports
        self._replica = replica
        self._own = own
        self._ranks = {*others} if own is None else {0, *others}
        self._others = sum(1 << rank for rank in others)  # as bits
        self._awaited: dict[int, _Awaited] = {}  # by the number of the moves
        self._of_own: queue.SimpleQueue[Arrived] = queue.SimpleQueue()
        self._having: dict[BlockKey, int] = {}  # bits of the other ranks that have files
        if own is not None:
            own.follow(self._note_own)

    def send(self, moves: BlockMoves) -> None:
        self.expect(moves)
        self._tell(Move(self._replica, moves))
        if self._own is not None:
            self._own.send(moves)

    def expect(self, moves: BlockMoves) -> None:
        """Note that all ranks get these moves, here or with a step."""
        blocks = [
            (group, content)
            for group, content in zip(moves.stores[:, 0].tolist(), moves.contents, strict=True)
        ]
        blocks += [(group, content) for group, _, content in moves.reads]
        if blocks:
            self._awaited[moves.number] = _Awaited(blocks, set(self._ranks), set())

    def arrived(self, *, wait: bool = False) -> Iterable[Arrival]:
        found = self._whole(wait_s=0.0)
        if wait and not found:
            found = self._whole(wait_s=_MOMENT_S)
        return found

    def is_stored(self, group: int, content: bytes) -> bool:
        self._take_files()
        return self._having.get((group, content), 0) == self._others and (
            self._own is None or self._own.is_stored(group, content)
        )

    def forget(self, group: int, content: bytes) -> None:
        self._take_files()
        self._having.pop((group, content), None)
        self._tell(ForgetBlock(self._replica, group, content))
        if self._own is not None:
            self._own.forget(group, content)

    def forget_all(self) -> None:
        """What another rank has reported before it hears of this may be found once more, but not
        read: that rank removes its files before it reads any for moves that are sent later."""
        self._take_files()
        self._having.clear()
        self._tell(ForgetBlocks(self._replica))
        if self._own is not None:
            is_done = self._own.begin_to_forget_all()
            # The mover may wait for a device that waits for a lost rank.
            while not is_done.wait(_MOMENT_S):
                self._reports.take_in()

    def _note_own(self, arrivals: list[Arrival]) -> None:
        """Called in the thread of rank 0's own mover."""
        if (report := report_of(0, self._replica, arrivals)) is not None:
            self._of_own.put(report)

    def _whole(self, *, wait_s: float) -> list[Arrival]:
        """Take in what ranks report; return the blocks of moves that have ended on all."""
        found: list[Arrival] = []
        for report in self._take_reports(wait_s):
            its = self._awaited[report.number]
            its.ranks.remove(report.rank)
            its.failed.update(report.failed)
            if not its.ranks:
                del self._awaited[report.number]
                found += [
                    Arrival(report.number, *key, ok=key not in its.failed) for key in its.blocks
                ]
        return found

    def _take_reports(self, wait_s: float) -> list[Arrived]:
        reports = []
        waits_here = any(0 in its.ranks for its in self._awaited.values())
        try:
            while True:
                reports.append(self._of_own.get(timeout=wait_s if waits_here else 0.0))
                waits_here = False
        except queue.Empty:
            pass
        if reports or waits_here:
            wait_s = 0.0
        return [*reports, *self._reports.take_arrived(self._replica, wait_s)]

    def _take_files(self) -> None:
        for report in self._reports.take_files(self._replica):
            bit = 1 << report.rank
            for key in report.gained:
                self._having[key] = self._having.get(key, 0) | bit
            for key in report.lost:
                left = self._having.get(key, 0) & ~bit
                if left:
                    self._having[key] = left
                else:
                    self._having.pop(key, None)

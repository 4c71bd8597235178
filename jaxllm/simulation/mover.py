"""The host's memory of a simulated replica, and the bus to it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxllm.scheduler.schedule import Arrival, BlockMoves


class Clock(Protocol):
    """What has a time."""

    now: float


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What the host keeps of a replica, by group: the cache groups, then snapshots of states."""

    num_places: tuple[int, ...]
    seconds: tuple[float, ...]  # that a block takes over the bus


class SimulatedMover:
    """Moves blocks in the time that a bus takes, which has a lane for each direction."""

    num_given = 0  # to other engines

    def __init__(self, clock: Clock, seconds: Sequence[float]) -> None:
        self._clock = clock
        self._seconds = np.array(seconds)
        self.loaded_at = 0.0  # when the devices have what was last sent to them
        self._stored_at = 0.0  # when the host has what was last sent to it
        self._coming: deque[tuple[float, Arrival]] = deque()

    def send(self, moves: BlockMoves) -> None:
        assert not (moves.reads or moves.takes), "there are no files, and no other engines"
        now = self._clock.now
        if len(moves.loads):
            self.loaded_at = max(now, self.loaded_at) + self._time(moves.loads)
        self._stored_at = max(now, self._stored_at)
        for store, content in zip(moves.stores, moves.contents, strict=True):
            self._stored_at += self._time(store[None])
            self._coming.append((self._stored_at, Arrival(moves.number, store[0], content, True)))

    def arrived(self, *, wait: bool = False) -> list[Arrival]:
        if wait and self._coming:
            self._clock.now = max(self._clock.now, self._coming[0][0])
        arrivals = []
        while self._coming and self._coming[0][0] <= self._clock.now:
            arrivals.append(self._coming.popleft()[1])
        return arrivals

    def is_stored(self, group: int, content: bytes) -> bool:
        return False

    def forget(self, group: int, content: bytes) -> None: ...

    def forget_all(self) -> None: ...

    def _time(self, moves: np.ndarray) -> float:
        return float(self._seconds[moves[:, 0]].sum())

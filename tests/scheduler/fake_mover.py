"""The host's memory and files of the fake device, whose copies arrive late, or fail."""

from collections import deque

import numpy as np

from jaxllm.scheduler.schedule import Arrival, BlockMoves


class FakeMover:
    """Moves blocks as the contract of moves says, and no sooner than it must."""

    def __init__(self, kv: list[np.ndarray], *, has_files: bool) -> None:
        self.kv = kv  # of the device, by group
        self.num_given = 0
        self.rng = np.random.default_rng(0)
        self.host: dict[tuple[int, int], np.ndarray] = {}  # by group and place
        self.is_prompt = False  # copies arrive at once, and none fails
        self.has_files = has_files
        self.files: dict[tuple[int, bytes], np.ndarray] = {}
        self.barred: list[tuple[int, bytes]] = []
        # Moves whose end the host has not heard of, with what the device has read for them.
        self.pending: deque[tuple[BlockMoves | tuple[int, bytes], list[np.ndarray]]] = deque()

    def send(self, moves: BlockMoves) -> None:
        loaded = [self.host[group, place].copy() for group, _, place in moves.loads.tolist()]
        read = [self.kv[group][block].copy() for group, block, _ in moves.stores.tolist()]
        for (group, block, _), values in zip(moves.loads.tolist(), loaded, strict=True):
            self.kv[group][block] = values
        self.pending.append((moves, read))

    def arrived(self, *, wait: bool = False) -> list[Arrival]:
        assert self.pending or not wait, "nothing is on its way"
        arrivals = []
        while self.pending and (wait or self.is_prompt or self.rng.random() < 0.5):
            arrivals += self.end_oldest()
            wait = False
        return arrivals

    def end_oldest(self) -> list[Arrival]:
        moves, read = self.pending.popleft()
        if not isinstance(moves, BlockMoves):
            self.files.pop(moves, None)
            self.barred.remove(moves)
            return []
        arrivals = []
        for (group, _, place), content, values in zip(
            moves.stores.tolist(), moves.contents, read, strict=True
        ):
            ok = self.is_prompt or self.rng.random() < 0.9
            if ok:
                self.host[group, place] = values
                if self.has_files:
                    self.files[group, content] = values
            arrivals.append(Arrival(moves.number, group, content, ok))
        for group, place, content in moves.reads:
            ok = (group, content) in self.files and self.rng.random() < 0.8
            if ok:
                self.host[group, place] = self.files[group, content]
            else:
                self.files.pop((group, content), None)
            arrivals.append(Arrival(moves.number, group, content, ok))
        return arrivals

    def is_stored(self, group: int, content: bytes) -> bool:
        return (group, content) in self.files and (group, content) not in self.barred

    def forget(self, group: int, content: bytes) -> None:
        self.barred.append((group, content))
        self.pending.append(((group, content), []))

    def forget_all(self) -> None:
        # The host has forgotten all that is on its way.
        while self.pending:
            self.end_oldest()
        self.files.clear()

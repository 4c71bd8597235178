"""What an engine does before it is ready, as plain data."""

import contextlib
import time
from collections.abc import Iterator

import msgspec


class Phase(msgspec.Struct):
    """A part of the start; times are those of time.time()."""

    name: str
    start: float
    end: float


class Phases(list[Phase]):
    """The parts of a start, in the order in which they end."""

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Note how long something takes."""
        start = time.time()
        yield
        self.append(Phase(name, start, time.time()))

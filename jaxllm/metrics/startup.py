"""The phases of an engine's start, as plain data."""

import contextlib
import time
from collections.abc import Iterator

import msgspec


class Phase(msgspec.Struct):
    """A phase of the start, in times of time.time()."""

    name: str
    start: float
    end: float


class Phases(list[Phase]):
    """The phases of a start, in the order of their ends."""

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the body of the `with` as a phase."""
        start = time.time()
        yield
        self.append(Phase(name, start, time.time()))

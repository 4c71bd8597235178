"""Which places on the host the mover's thread has yet to fill.

Over several hosts rank 0 hears of its own thread only, or of that of another rank, and plans loads
of what has come there. A rank whose thread is later must fill a place before it loads from it.
It waits only for what it has dispatched itself, behind steps that rank 0 has sent to all ranks
before, so the rank that waits for the earliest step always goes on, and no ranks wait for each
other.
"""

import threading
from collections.abc import Iterable, Sequence

Place = tuple[int, int]  # cache group, place


class Filling:
    """The engine's thread begins and waits; the mover's thread ends what was begun, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._last: dict[Place, int] = {}  # what fills a place, counted from 1
        self._failed: dict[Place, int] = {}
        self._num_begun = self._num_ended = 0
        self._num_places_ahead = 0  # begun and not ended

    def begin(self, places: Sequence[Place], others: Iterable[Place]) -> None:
        """Note that places are to be filled, and others in a way of their own."""
        with self._changed:
            self._num_begun += 1
            self._num_places_ahead += len(places)
        for place in places:
            self._last[place] = self._num_begun
        for place in others:
            self._last.pop(place, None)

    def end(self, num_places: int, failed: Iterable[Place]) -> None:
        """Note that the oldest that was begun has ended."""
        with self._changed:
            self._num_ended += 1
            self._num_places_ahead -= num_places
            for place in failed:
                self._failed[place] = self._num_ended
            self._changed.notify_all()

    def await_places(self, places: Sequence[Place]) -> None:
        """Wait until places are filled. Raise if one could not be."""
        last = [self._last.get(place, 0) for place in places]
        with self._changed:
            self._changed.wait_for(lambda: self._num_ended >= max(last, default=0))
            for place, number in zip(places, last, strict=True):
                if number and self._failed.get(place) == number:
                    raise RuntimeError(f"a block did not come to the host: (group, place) {place}")

    def await_at_most(self, num_places: int) -> None:
        """Wait until no more places than these are to be filled."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_places_ahead <= num_places)

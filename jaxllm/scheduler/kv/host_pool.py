"""The blocks of one cache group on the host: which contents have a place there.

A content is *there*, or on its way: a device block is being copied, or a file read. What is on its
way is known by the number of the moves that brought it, since it may fail, be forgotten, and be
sent again before the host has heard of the first time. The least recently used content that is
there gives way.
"""

from collections import OrderedDict
from typing import NamedTuple


class _Coming(NamedTuple):
    number: int  # of the moves
    place: int
    is_of_others: bool  # it comes from another engine


class HostPool:
    """Places 0 to num_places - 1. Every operation costs O(1)."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        # So that what is found there is not given up for what may never be asked for. Other engines
        # may be slow, so what comes from them is counted apart.
        self.max_coming = max(1, num_places // 4)
        self._num_of_others = 0
        self._free = list(range(num_places - 1, -1, -1))  # the last is taken first
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # the last used last
        self._coming: dict[bytes, _Coming] = {}

    @property
    def num_used(self) -> int:
        return len(self._place_of) + len(self._coming)

    @property
    def num_coming(self) -> int:
        return len(self._coming)

    def has(self, content: bytes) -> bool:
        """Whether a content is there or on its way."""
        return content in self._place_of or content in self._coming

    def is_coming(self, content: bytes) -> bool:
        return content in self._coming

    def will_have(self, content: bytes) -> bool:
        """Whether a content is there, or on its way from the devices or a file."""
        coming = self._coming.get(content)
        return content in self._place_of or (coming is not None and not coming.is_of_others)

    def find(self, content: bytes) -> int | None:
        """Return the place of a content that is there, and note that it is used."""
        place = self._place_of.get(content)
        if place is not None:
            self._place_of.move_to_end(content)
        return place

    def expect(self, content: bytes, number: int, *, is_of_others: bool = False) -> int | None:
        """Return a place for a content that comes with the moves of this number; None if too many
        are on their way."""
        assert not self.has(content), "the content has a place"
        num_of_kind = self._num_of_others
        if not is_of_others:
            num_of_kind = len(self._coming) - self._num_of_others
        if num_of_kind >= self.max_coming:
            return None
        if self._free:
            place = self._free.pop()
        else:  # not all are on their way, so some are there
            _, place = self._place_of.popitem(last=False)
        self._coming[content] = _Coming(number, place, is_of_others)
        self._num_of_others += is_of_others
        return place

    def arrive(self, content: bytes, number: int, *, ok: bool) -> None:
        """Take in that a content of these moves is there, or has failed. Nothing happens if it has
        been forgotten meanwhile."""
        coming = self._coming.get(content)
        if coming is None or coming.number != number:
            return
        del self._coming[content]
        self._num_of_others -= coming.is_of_others
        if ok:
            self._place_of[content] = coming.place
        else:
            self._free.append(coming.place)

    def forget(self, content: bytes) -> None:
        """Give the place of a content back. A copy on its way to it ends before the next one to the
        same place begins."""
        place = self._place_of.pop(content, None)
        if place is None:
            coming = self._coming.pop(content, None)
            if coming is None:
                return
            place = coming.place
            self._num_of_others -= coming.is_of_others
        self._free.append(place)

    def lose_coming(self) -> None:
        """Forget what is on its way."""
        for content in list(self._coming):
            self.forget(content)

    def reset(self) -> None:
        """Forget everything."""
        for content in [*self._coming, *self._place_of]:
            self.forget(content)

    def check(self) -> None:
        """Assert the invariants. O(places)."""
        coming = [one.place for one in self._coming.values()]
        places = self._free + list(self._place_of.values()) + coming
        assert sorted(places) == list(range(self.num_places)), "a place is lost, or there twice"
        assert not self._place_of.keys() & self._coming.keys(), "a content has two places"
        of_others = sum(one.is_of_others for one in self._coming.values())
        assert of_others == self._num_of_others
        for number in (of_others, len(coming) - of_others):
            assert number <= self.max_coming, f"{number} of a kind are on their way"

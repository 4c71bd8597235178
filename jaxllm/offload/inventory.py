"""What is at each place of the host, as the mover's thread knows it, which fills them."""

from typing import NamedTuple


class _Awaited(NamedTuple):
    number: int  # of the moves that bring it
    content: bytes


class Inventory:
    """Places by cache group. A place awaits a content from certain moves on, and then has it."""

    def __init__(self) -> None:
        self._awaited: dict[tuple[int, int], _Awaited] = {}  # by group and place
        self._content_at: dict[tuple[int, int], bytes] = {}
        self._place_of: dict[tuple[int, bytes], int] = {}

    def await_content(self, group: int, place: int, number: int, content: bytes) -> None:
        """Note that a place passes on."""
        self._awaited[group, place] = _Awaited(number, content)
        former = self._content_at.pop((group, place), None)
        if former is not None and self._place_of.get((group, former)) == place:
            del self._place_of[group, former]

    def awaits(self, group: int, place: int, number: int, content: bytes) -> bool:
        """Whether a place still waits for this content of the moves of this number."""
        return self._awaited.get((group, place)) == (number, content)

    def put(self, group: int, place: int, number: int, content: bytes) -> None:
        """Note that a place has what it waits for. Anything else does not count."""
        if self.awaits(group, place, number, content):
            del self._awaited[group, place]
            self._content_at[group, place] = content
            self._place_of[group, content] = place

    def find(self, group: int, content: bytes) -> int | None:
        """The place of a content."""
        return self._place_of.get((group, content))

    def forget(self, group: int, content: bytes) -> None:
        """Find a content no more, nor wait for it."""
        self._place_of.pop((group, content), None)
        for at, its in list(self._awaited.items()):
            if at[0] == group and its.content == content:
                del self._awaited[at]

    def forget_all(self) -> None:
        self._place_of.clear()
        self._awaited.clear()

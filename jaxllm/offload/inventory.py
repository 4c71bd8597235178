"""What is at each place of the host, as the mover's thread knows it, which fills them."""


class Inventory:
    """Places by cache group. A place awaits a content from certain moves on, and then has it."""

    def __init__(self) -> None:
        self._awaited: dict[tuple[int, int], int] = {}  # by group and place: number of the moves
        self._content_at: dict[tuple[int, int], bytes] = {}
        self._place_of: dict[tuple[int, bytes], int] = {}

    def await_content(self, group: int, place: int, number: int) -> None:
        """Note that a place passes on."""
        self._awaited[group, place] = number
        content = self._content_at.pop((group, place), None)
        if content is not None and self._place_of.get((group, content)) == place:
            del self._place_of[group, content]

    def awaits(self, group: int, place: int, number: int) -> bool:
        """Whether a place is still for what comes with the moves of this number."""
        return self._awaited.get((group, place)) == number

    def put(self, group: int, place: int, content: bytes) -> None:
        """Note that a place has its content."""
        self._content_at[group, place] = content
        self._place_of[group, content] = place

    def find(self, group: int, content: bytes) -> int | None:
        """The place of a content."""
        return self._place_of.get((group, content))

    def forget(self, group: int, content: bytes) -> None:
        """Find a content no more."""
        self._place_of.pop((group, content), None)

    def forget_all(self) -> None:
        self._place_of.clear()

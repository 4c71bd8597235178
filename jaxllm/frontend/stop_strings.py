"""Finds stop strings in an answer's text as it grows, also across the borders of tokens.

It stands between the detokenizer and the answer: text goes in as tokens complete it, and comes out
once it can no longer be part of a stop string.
"""


class StopStrings:
    """Searches one answer. The match that ends first wins; of two that end together, the string
    that is first in the list.

    With `include` the stop string stays in the text, so no text is held back.
    """

    __slots__ = ("_include", "_max_tail", "_num_held", "_stop", "_tail", "match")

    def __init__(self, stop: list[str], *, include: bool):
        self._stop = stop
        self._include = include
        self._max_tail = max(map(len, stop)) - 1
        self._tail = ""  # the end of the text, where an incomplete match may begin
        self._num_held = 0  # how many characters of the tail are held back
        self.match: str | None = None

    def push(self, new: str, *, search: bool = True) -> str:
        """Take new text and return the text that may be shown; after a match (`self.match`), the
        rest of the answer. Without `search`, no match may end in this text."""
        text = self._tail + new
        shown = len(self._tail) - self._num_held
        if search and new:
            cut = self._find(text)
            if cut is not None:
                self._num_held = 0
                return text[shown:cut]
        self._tail = text[-self._max_tail :] if self._max_tail else ""
        self._num_held = 0 if self._include else len(self._tail)
        return text[shown : len(text) - self._num_held]

    def flush(self) -> str:
        """Return the text that was held back, when the answer ends without a stop string."""
        held = self._tail[len(self._tail) - self._num_held :]
        self._num_held = 0
        return held

    def _find(self, text: str) -> int | None:
        """Set `match` and return where to cut if a stop string ends in the new text."""
        first_end = len(text) + 1
        for stop in self._stop:
            # An earlier match would end in the tail, which has been searched.
            start = text.find(stop, max(0, len(self._tail) + 1 - len(stop)), first_end - 1)
            if start >= 0:
                first_end = start + len(stop)
                self.match = stop
        if self.match is None:
            return None
        return first_end if self._include else first_end - len(self.match)

"""Stop strings, found in an answer's text as it grows, wherever the borders of tokens fall.

Stands between the detokenizer and the answer: text goes in as tokens complete it, and comes out
once it cannot be part of a stop string any more.
"""


class StopStrings:
    """Watches one answer. The match that ends first wins; of two that end together, the one that
    stands first in the list.

    With `include` the stop string stays in the text, so nothing has to be held back.
    """

    __slots__ = ("_include", "_max_tail", "_num_held", "_stop", "_tail", "match")

    def __init__(self, stop: list[str], *, include: bool):
        self._stop = stop
        self._include = include
        self._max_tail = max(map(len, stop)) - 1
        self._tail = ""  # end of the text: where a match that is not complete yet may begin
        self._num_held = 0  # characters of the tail that have not come out yet
        self.match: str | None = None

    def push(self, new: str, *, search: bool = True) -> str:
        """Take new text and return what may be shown. After a match (`self.match`), that is the
        rest of the answer. Without `search` no match ends in this text."""
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
        """Return what was held back: the answer has ended, and no stop string with it."""
        held = self._tail[len(self._tail) - self._num_held :]
        self._num_held = 0
        return held

    def _find(self, text: str) -> int | None:
        """Set `match` and return where to cut, if a stop string ends in the new text."""
        first_end = len(text) + 1
        for stop in self._stop:
            # Not before this: it would end in the tail, which has been searched.
            start = text.find(stop, max(0, len(self._tail) + 1 - len(stop)), first_end - 1)
            if start >= 0:
                first_end = start + len(stop)
                self.match = stop
        if self.match is None:
            return None
        return first_end if self._include else first_end - len(self.match)

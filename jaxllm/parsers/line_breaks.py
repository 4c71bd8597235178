"""Removes line breaks that belong to the tags around a text and not to the text."""

from jaxllm.parsers.text_stream import Sink


class LineBreakTrimmer:
    """Passes a text on without up to `at_most` line breaks at each end (None: all of them)."""

    def __init__(self, sink: Sink, at_most: int | None = None):
        self._sink = sink
        self._at_most = at_most
        self._num_to_skip = at_most  # at the beginning; 0 after the first other text
        self._num_held = 0  # line breaks that may be the last ones

    def write(self, text: str) -> None:
        """Take the next piece of the text."""
        if self._num_to_skip != 0:
            text = self._skip(text)
        body = text.rstrip("\n")
        num_new = len(text) - len(body)
        if body:
            self._sink("\n" * self._num_held + body)
            self._num_held = 0
        self._num_held += num_new
        if self._at_most is not None and self._num_held > self._at_most:
            self._sink("\n" * (self._num_held - self._at_most))
            self._num_held = self._at_most

    def end(self, *, trim: bool = True) -> None:
        """End the text. Without `trim`, the text was cut off and keeps its last line breaks."""
        if not trim:
            self._sink("\n" * self._num_held)
        self._num_held = 0

    def _skip(self, text: str) -> str:
        rest = text.lstrip("\n")
        num_skipped = len(text) - len(rest)
        if self._num_to_skip is not None:
            num_skipped = min(num_skipped, self._num_to_skip)
            self._num_to_skip -= num_skipped
            rest = text[num_skipped:]
        if rest:
            self._num_to_skip = 0
        return rest

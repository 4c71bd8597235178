"""Runs a parser: takes the text of one answer and returns deltas."""

from jaxllm.parsers.deltas import Delta, DeltaWriter, ParsedAnswer, add_up
from jaxllm.parsers.text_stream import Reading, TextStream


class StreamParser:
    """Parses one streamed answer. The sum of the deltas does not depend on how its text is split.

    `reading` reads from `text` and writes to `deltas`.
    """

    def __init__(self, text: TextStream, deltas: DeltaWriter, reading: Reading[None]):
        self._text = text
        self._deltas = deltas
        self._reading = reading
        next(reading)

    def feed(self, text: str) -> list[Delta]:
        """Take the next piece of the answer; return the deltas that are certain now."""
        self._text.append(text)
        next(self._reading)
        return self._deltas.take()

    def finish(self) -> list[Delta]:
        """End the answer; return the deltas that were held back."""
        self._text.end()
        for _ in self._reading:
            raise AssertionError("the parser waits for text after the end of the answer")
        return self._deltas.take()

    def parse(self, text: str) -> ParsedAnswer:
        """Parse a whole answer at once."""
        return add_up([*self.feed(text), *self.finish()])

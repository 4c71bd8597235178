"""Converts the value of one parameter from plain text to JSON, as it streams."""

from jaxllm.parsers.line_breaks import LineBreakTrimmer
from jaxllm.parsers.text_stream import Sink
from jaxllm.parsers.tools.parameter_types import quote, to_json

_WORD_TYPES = {"string", "null", "boolean"}
_MAX_WORD_SIZE = len("false")


class ParameterValue:
    """Writes JSON while text arrives if the value must be a string, otherwise when it ends."""

    def __init__(self, types: frozenset[str] | None, sink: Sink):
        self._sink = sink
        self._types = types or frozenset({"string"})
        self._may_be_word = self._types <= _WORD_TYPES and self._types != {"string"}
        self._is_string = False
        self._held: list[str] = []
        self._num_held = 0
        self._trimmer = LineBreakTrimmer(self._write, at_most=1)
        if self._types == {"string"}:
            self._begin_string()

    def write(self, text: str) -> None:
        """Take the next text of the value, including the line breaks around it."""
        self._trimmer.write(text)

    def end(self, *, is_whole: bool) -> None:
        """End the value; `is_whole` is False if the answer ended within it."""
        self._trimmer.end(trim=is_whole)
        if self._is_string:
            if is_whole:
                self._sink('"')
        else:
            text = "".join(self._held)
            self._sink(to_json(text, self._types) if is_whole else text)

    def _write(self, text: str) -> None:
        if self._is_string:
            self._sink(quote(text)[1:-1])
            return
        self._held.append(text)
        self._num_held += len(text)
        if self._may_be_word and self._num_held > _MAX_WORD_SIZE:
            self._begin_string()

    def _begin_string(self) -> None:
        self._is_string = True
        self._sink('"' + quote("".join(self._held))[1:-1])
        self._held.clear()

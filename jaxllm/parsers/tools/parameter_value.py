"""The value of one parameter, on its way from plain text to JSON."""

from jaxllm.parsers.line_breaks import LineBreakTrimmer
from jaxllm.parsers.text_stream import Sink
from jaxllm.parsers.tools.parameter_types import quote, to_json

_WORD_TYPES = {"string", "null", "boolean"}
_MAX_WORD_SIZE = len("false")


class ParameterValue:
    """Writes JSON while the text comes, where it can only be a string; at its end otherwise."""

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
        """Take more of the value, with the line breaks around it."""
        self._trimmer.write(text)

    def end(self, *, is_whole: bool) -> None:
        """The value has ended; or the answer has, in the midst of it."""
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

"""The value of one parameter that is plain text between tags, as it streams."""

from collections.abc import Sequence

from jaxllm.parsers.line_breaks import LineBreakTrimmer
from jaxllm.parsers.text_stream import SPACE, Markers, Reading, Sink, TextStream
from jaxllm.parsers.tools.parameter_types import quote, to_json

_WORD_TYPES = {"string", "null", "boolean"}
_MAX_WORD_SIZE = len("false")


class ParameterValue:
    """Writes JSON while text arrives if the value must be a string, otherwise when it ends.

    Up to `num_line_breaks` at each end belong to the tags.
    """

    def __init__(self, types: frozenset[str] | None, sink: Sink, *, num_line_breaks: int):
        self._sink = sink
        self._types = types or frozenset({"string"})
        self._may_be_word = self._types <= _WORD_TYPES and self._types != {"string"}
        self._is_string = False
        self._held: list[str] = []
        self._num_held = 0
        self._trimmer = LineBreakTrimmer(self._write, at_most=num_line_breaks)
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


class ValueTags:
    """Tells where a value ends.

    A value ends at `close` if a tag of `followers` or the end of the answer comes after it;
    otherwise `close` is part of the value. A value whose `close` is missing ends at a line that
    begins with one of `lines`.
    """

    def __init__(self, close: str, followers: Sequence[str], lines: Sequence[str]):
        self.close = close
        self.followers = followers
        self.ends = Markers(close, *(f"\n{tag}" for tag in lines))


def read_tagged_value(text: TextStream, value: ParameterValue, tags: ValueTags) -> Reading[None]:
    """Read a value and its closing tag; write and end the value."""
    while (marker := (yield from text.take_until(tags.ends, value.write))) is not None:
        if marker != tags.close:
            text.take(value.write)  # the line break
            break
        closing: list[str] = []
        yield from text.accept(tags.close, closing.append)
        yield from text.take_while(SPACE, closing.append)
        if (yield from _is_followed(text, tags.followers)):
            break
        value.write("".join(closing))
    value.end(is_whole=marker is not None)


def _is_followed(text: TextStream, followers: Sequence[str]) -> Reading[bool]:
    if not (yield from text.peek()):
        return True
    for tag in followers:
        if (yield from text.starts_with(tag, may_be_cut_off=True)):
            return True
    return False

"""Converts nested lists and dicts to JSON while they are read, for every notation of scalars."""

from collections.abc import Callable, Mapping

from jaxllm.parsers.text_stream import SPACE, Reading, Sink, TextStream

# Passes on one scalar as JSON, as a string if it is a key. Returns whether it is a whole scalar.
ScalarReader = Callable[[TextStream, Sink, bool], Reading[bool]]

_AS_JSON = {"(": "[", ")": "]"}


class _Bracket:
    """An open list or dict."""

    __slots__ = ("closing", "separator")

    def __init__(self, closing: str):
        self.closing = closing
        self.separator = ""  # required before the next item

    @property
    def expects_key(self) -> bool:
        return self.closing == "}" and self.separator != ":"

    def end_item(self) -> None:
        self.separator = ":" if self.expects_key else ","


def read_nested(
    text: TextStream, sink: Sink, closing: Mapping[str, str], read_scalar: ScalarReader
) -> Reading[bool]:
    """Pass on a value as JSON. Return whether it is complete; otherwise the part that could be read
    has been passed on.

    `closing` has the closing bracket of each opening one. There is no recursion, so deep nesting
    cannot overflow the stack.
    """
    brackets: list[_Bracket] = []
    while True:
        if brackets:
            bracket = brackets[-1]
            yield from text.take_while(SPACE, _drop)
            is_separated = yield from text.accept(bracket.separator, _drop)
            yield from text.take_while(SPACE, _drop)
            may_close = bracket.separator != ":"
            if may_close and (yield from text.accept(bracket.closing, _drop)):
                sink(_AS_JSON.get(bracket.closing, bracket.closing))
                brackets.pop()
                if not brackets:
                    return True
                brackets[-1].end_item()
                continue
            if not is_separated:
                return False
            sink(f"{bracket.separator} " if bracket.separator else "")
        is_key = bool(brackets) and brackets[-1].expects_key
        opening = yield from text.peek()
        if opening in closing:
            if is_key:
                return False
            text.take(_drop)
            sink(_AS_JSON.get(opening, opening))
            brackets.append(_Bracket(closing[opening]))
            continue
        if not (yield from read_scalar(text, sink, is_key)):
            return False
        if not brackets:
            return True
        brackets[-1].end_item()


def _drop(text: str) -> None:
    """A sink for text that JSON does not need."""

"""The formats of Gemma 4 and FunctionGemma: JSON with other quotes, and keys without any.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>
    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>

There are no escapes: a string has all characters up to the next quotes. The parser writes the
arguments as JSON. A value that is neither quoted nor a number or constant becomes a string, and
strings of JSON, which small models write at times, are passed on.
"""

import re
from collections.abc import Sequence

from jaxllm.parsers.text_stream import SPACE, Markers, Reading, Sink, TextStream
from jaxllm.parsers.tools.base import (
    Tool,
    ToolCallOutput,
    ToolFormat,
    read_content,
    read_end,
)
from jaxllm.parsers.tools.json_call import read_string
from jaxllm.parsers.tools.nested import read_nested
from jaxllm.parsers.tools.parameter_types import CONSTANTS, NUMBER, quote

_CALL = "call:"
_NAME = re.compile(r"[\w.-]*")
_CLOSING = {"[": "]", "{": "}"}


class _GemmaCalls:
    """The format with these tags around a call and these quotes."""

    def __init__(self, open_tag: str, close_tag: str, quotes: str):
        self._open = open_tag
        self._close = close_tag
        self._quotes = quotes
        self._begin = Markers(open_tag)
        self._end_string = Markers(quotes)
        self._end_key = Markers(":", ",", "}", close_tag)
        self._end_word = Markers(",", "}", "]", close_tag)

    def read(self, text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
        while (yield from read_content(text, out, self._begin)):
            yield from text.accept(self._open, out.form)
            yield from text.take_while(SPACE, out.form)
            yield from text.accept(_CALL, out.form)
            name = yield from text.collect(_NAME, out.form)
            if name and (yield from text.peek()) == "{":
                out.begin_call(name)
                yield from read_nested(text, out.arguments, _CLOSING, self._read_scalar)
                out.end_call()
                yield from read_end(text, out, self._close)

    def _read_scalar(self, text: TextStream, sink: Sink, is_key: bool) -> Reading[bool]:
        if (yield from text.accept(self._quotes, _drop)):
            return (yield from self._read_string(text, sink))
        if (yield from text.peek()) == '"':
            return (yield from read_string(text, sink))
        pieces: list[str] = []
        yield from text.take_until(self._end_key if is_key else self._end_word, pieces.append)
        word = "".join(pieces).strip()
        is_bare = not is_key and (word in CONSTANTS or NUMBER.fullmatch(word))
        sink(CONSTANTS.get(word, word) if is_bare or not word else quote(word))
        return word != ""

    def _read_string(self, text: TextStream, sink: Sink) -> Reading[bool]:
        sink('"')
        end = yield from text.take_until(self._end_string, lambda piece: sink(quote(piece)[1:-1]))
        if end is None:
            return False
        yield from text.accept(end, _drop)
        sink('"')
        return True


def _drop(text: str) -> None:
    """A sink for quotes, which are others in JSON."""


GEMMA4 = ToolFormat(
    _GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>').read, needs_special_tokens=True
)
FUNCTIONGEMMA = ToolFormat(
    _GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>").read,
    needs_special_tokens=True,
)

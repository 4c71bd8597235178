"""Converts Python literals to JSON while they are read."""

import re

from jaxllm.parsers.text_stream import Reading, Sink, TextStream
from jaxllm.parsers.tools.nested import read_nested
from jaxllm.parsers.tools.parameter_types import CONSTANTS, NUMBER, quote

_WORD = re.compile(r"[\w.+-]*")
_CLOSING = {"[": "]", "(": ")", "{": "}"}

_IN_STRING = re.compile(r"[^\\'\"]*")
_HEX = re.compile(r"[0-9a-fA-F]")
_HEX_SIZES = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a"}
_ESCAPES |= {"0": "\0", "\n": "", "\\": "\\", "'": "'", '"': '"'}


def read_literal(text: TextStream, sink: Sink) -> Reading[bool]:
    """Pass on a literal as JSON. Return whether it is a complete literal; otherwise the part that
    could be read has been passed on. Lists and tuples become arrays, and keys of dicts become
    strings.
    """
    return read_nested(text, sink, _CLOSING, _read_scalar)


def _read_scalar(text: TextStream, sink: Sink, is_key: bool) -> Reading[bool]:
    if (yield from text.peek()) in ("'", '"'):
        return (yield from _read_string(text, sink))
    word = yield from text.collect(_WORD, _drop)
    is_good = word in CONSTANTS or NUMBER.fullmatch(word) is not None
    value = CONSTANTS.get(word, word)
    sink(quote(value) if is_key and is_good else value)
    return is_good


def _read_string(text: TextStream, sink: Sink) -> Reading[bool]:
    def write(piece: str) -> None:
        sink(quote(piece)[1:-1])

    mark = yield from text.peek()
    delimiter = mark * 3 if (yield from text.starts_with(mark * 3)) else mark
    yield from text.accept(delimiter, _drop)
    sink('"')
    while True:
        yield from text.take_while(_IN_STRING, write)
        if (yield from text.accept(delimiter, _drop)):
            sink('"')
            return True
        char = yield from text.peek()
        if char == "":
            return False
        if char == "\\":
            text.take(_drop)
            yield from _read_escape(text, write, sink)
        else:
            text.take(write)  # the other kind of quote


def _read_escape(text: TextStream, write: Sink, sink: Sink) -> Reading[None]:
    """Read the text after a backslash. As in Python, a backslash that escapes nothing is kept."""
    kind = yield from text.peek()
    if kind in _ESCAPES:
        text.take(_drop)
        write(_ESCAPES[kind])
        return
    if kind not in _HEX_SIZES:
        write("\\")
        return
    text.take(_drop)
    digits = ""
    while len(digits) < _HEX_SIZES[kind]:
        digit = yield from text.peek()
        if not _HEX.match(digit):
            break
        text.take(_drop)
        digits += digit
    is_whole = len(digits) == _HEX_SIZES[kind]
    if is_whole and kind == "u":
        sink(f"\\u{digits}")  # JSON has this escape, too, and joins surrogate pairs
    elif is_whole and _is_character(int(digits, 16)):
        write(chr(int(digits, 16)))
    else:
        write(f"\\{kind}{digits}")


def _is_character(code: int) -> bool:
    return code < 0xD800 or 0xDFFF < code <= 0x10FFFF


def _drop(text: str) -> None:
    """A sink for text that JSON does not need."""

"""Calls as JSON objects, {"name": ..., "arguments": {...}}, arrays of them, and other JSON values.

A value is streamed unchanged. The reader looks only at strings and brackets, to find the end of the
value: it needs one counter for any depth. It does not validate the JSON inside; the client does. A
marker outside of strings ends a value whose brackets are still open.
"""

import json
import re
from functools import partial

from jaxllm.parsers.text_stream import SPACE, Reading, Sink, TextStream
from jaxllm.parsers.tools.base import ToolCallOutput, read_end

_SPACE_OR_COMMA = re.compile(r"[\s,]*")
_IN_STRING = re.compile(r'[^"\\]*')
_IN_BRACKETS = re.compile(r'[^"{}\[\]<]*')  # markers begin with "<" or "["
_IN_SCALAR = re.compile(r'[^\s,"{}\[\]<]*')

_DECODER = json.JSONDecoder(strict=False)  # models write line breaks within strings

# Names of the arguments' key in different formats, and keys that have no meaning.
_ARGUMENTS = ("arguments", "parameters")
_EMPTY_KEYS = ("type", "id")


def read_calls(
    text: TextStream,
    out: ToolCallOutput,
    *,
    end_marker: str | None = None,
    is_announced: bool = True,
    name_key: str = "name",
) -> Reading[bool]:
    """Read a call or an array of calls, if one comes next. Return whether there was a call; see
    `read_call`. The first object that is not a call ends an array."""
    read = partial(
        read_call, text, out, end_marker=end_marker, is_announced=is_announced, name_key=name_key
    )
    first = yield from text.peek()
    if first == "{":
        return (yield from read())
    if first != "[" or (end_marker and (yield from text.starts_with(end_marker))):
        return False
    text.take(out.form)
    has_calls = False
    while True:
        yield from text.take_while(_SPACE_OR_COMMA, out.form)
        if (yield from text.peek()) != "{":
            break
        if not (yield from read()):
            return has_calls
        has_calls = True
    if has_calls:
        yield from read_end(text, out, "]")
    return has_calls


def read_call(
    text: TextStream,
    out: ToolCallOutput,
    *,
    end_marker: str | None = None,
    is_announced: bool,
    name_key: str = "name",
) -> Reading[bool]:
    """Read an object that may be a call, beginning at its brace. Return whether it was one.

    After a marker, an object with a name is a call. Without a marker, it needs a name and
    arguments, and no keys that calls do not have. Keys may be in any order.
    """
    name = ""
    early: list[str] = []  # arguments that came before the name
    has_arguments = False

    def begin() -> None:
        if name and not out.in_call and (is_announced or has_arguments):
            out.begin_call(name)
            out.arguments("".join(early))

    text.take(out.form)
    while True:
        yield from text.take_while(_SPACE_OR_COMMA, out.form)
        if (yield from text.accept("}", out.form)):
            if out.in_call and not has_arguments:
                out.arguments("{}")
            break
        key = yield from _read_key(text, out.form)
        if key == name_key and not name:
            name = (yield from _read_text(text, out.form)) or ""
            begin()
            is_good = bool(name)
        elif key in _ARGUMENTS and not has_arguments:
            has_arguments = True
            begin()
            sink = out.arguments if out.in_call else early.append
            is_good = yield from _read_arguments(text, sink, out.form, end_marker)
        elif key is not None and (is_announced or out.in_call or key in _EMPTY_KEYS):
            is_good = yield from read_value(text, out.form, end_marker)
        else:
            is_good = False
        if not is_good:
            break
    was_call = out.in_call
    out.end_call()
    return was_call


def read_value(text: TextStream, sink: Sink, end_marker: str | None = None) -> Reading[bool]:
    """Pass on a JSON value. Return whether it is complete."""
    first = yield from text.peek()
    if first == '"':
        return (yield from read_string(text, sink))
    if first not in ("{", "["):
        return bool((yield from text.collect(_IN_SCALAR, sink)))
    depth = 0
    while True:
        yield from text.take_while(_IN_BRACKETS, sink)
        char = yield from text.peek()
        if end_marker and char == end_marker[0] and (yield from text.starts_with(end_marker)):
            return False
        if char == '"':
            if not (yield from read_string(text, sink)):
                return False
        elif char == "":
            return False
        else:
            text.take(sink)
            depth += (char in "{[") - (char in "}]")
            if depth == 0:
                return True


def read_string(text: TextStream, sink: Sink) -> Reading[bool]:
    """Pass on a JSON string with its quotes. Return whether it was closed."""
    text.take(sink)
    while True:
        yield from text.take_while(_IN_STRING, sink)
        char = yield from text.peek()
        if char == "":
            return False
        text.take(sink)
        if char == '"':
            return True
        if (yield from text.peek()):  # the character that the backslash escapes
            text.take(sink)


def _read_arguments(
    text: TextStream, sink: Sink, form: Sink, end_marker: str | None
) -> Reading[bool]:
    """Pass on a call's arguments. Some models write them as a string that contains the JSON."""
    if (yield from text.peek()) != '"':
        return (yield from read_value(text, _both(sink, form), end_marker))
    pieces: list[str] = []
    is_whole = yield from read_string(text, _both(pieces.append, form))
    literal = "".join(pieces)
    sink(_unquote(literal) or literal)
    return is_whole


def _read_key(text: TextStream, sink: Sink) -> Reading[str | None]:
    """Read a key, the colon and the space around them. None if there is no key or colon."""
    key = yield from _read_text(text, sink)
    yield from text.take_while(SPACE, sink)
    if key is None or not (yield from text.accept(":", sink)):
        return None
    yield from text.take_while(SPACE, sink)
    return key


def _read_text(text: TextStream, sink: Sink) -> Reading[str | None]:
    """Read a JSON string and return its text; None if there is no valid string."""
    if (yield from text.peek()) != '"':
        return None
    pieces: list[str] = []
    yield from read_string(text, _both(pieces.append, sink))
    return _unquote("".join(pieces))


def _unquote(literal: str) -> str | None:
    """Decode a JSON string; None if it is incomplete or has invalid escapes."""
    try:
        value: str = _DECODER.decode(literal)
        value.encode()  # refuses half of a surrogate pair
    except ValueError:
        return None
    return value


def _both(first: Sink, second: Sink) -> Sink:
    def write(piece: str) -> None:
        first(piece)
        second(piece)

    return write

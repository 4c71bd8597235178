"""Reads a call in Python, f(city='Paris', units="metric").

All arguments are keyword arguments, and their values are literals.
"""

import re

from jaxllm.parsers.text_stream import SPACE, Reading, Sink, TextStream
from jaxllm.parsers.tools.base import ToolCallOutput
from jaxllm.parsers.tools.parameter_types import quote
from jaxllm.parsers.tools.python_literal import read_literal

_FUNCTION = re.compile(r"[\w.-]*")
_ARGUMENT = re.compile(r"\w*")


def read_call(text: TextStream, out: ToolCallOutput) -> Reading[bool]:
    """Read one call. Return whether there was a complete one."""
    yield from text.take_while(SPACE, out.form)
    name = yield from text.collect(_FUNCTION, out.form)
    if not name or not (yield from text.accept("(", out.form)):
        return False
    argument = yield from _read_argument_name(text, out.form)
    if not argument and (argument is None or not (yield from text.starts_with(")"))):
        return False
    out.begin_call(name)
    is_whole = yield from _read_arguments(text, out, argument)
    out.end_call()
    return is_whole


def _read_arguments(text: TextStream, out: ToolCallOutput, name: str | None) -> Reading[bool]:
    """Read the arguments, beginning with the value of the first; its name has been read."""
    out.arguments("{")
    separator = ""
    while name:
        out.arguments(f"{separator}{quote(name)}: ")
        separator = ", "
        if not (yield from read_literal(text, out.arguments)):
            return False
        yield from text.take_while(SPACE, out.form)
        yield from text.accept(",", out.form)
        held: list[str] = []
        name = yield from _read_argument_name(text, held.append)
        if name is None:
            if (yield from text.peek()):
                out.content("".join(held))
            return False
    if not (yield from text.accept(")", out.form)):
        return False
    out.arguments("}")
    return True


def _read_argument_name(text: TextStream, sink: Sink) -> Reading[str | None]:
    """Read an argument's name and "="; return "" if there is no name, None if there is no "="."""
    yield from text.take_while(SPACE, sink)
    name = yield from text.collect(_ARGUMENT, sink)
    if not name:
        return ""
    yield from text.take_while(SPACE, sink)
    if not (yield from text.accept("=", sink)):
        return None
    yield from text.take_while(SPACE, sink)
    return name

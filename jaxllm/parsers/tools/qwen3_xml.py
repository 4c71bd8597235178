"""The format of Qwen 3 Coder: each parameter's value is plain text between tags.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The parser writes the arguments as JSON, by the types in the tool's schema. Parameters that are not
in the schema are strings. One line break at each end of a value belongs to the tags.

Models omit tags. A call may begin at <function=...> and end where the next call begins. A value
ends at </parameter> if another tag or the end of the answer follows; otherwise </parameter> is part
of the value. A value also ends at a line that begins with the next parameter or the end of the
call. Other text between parameters becomes content.
"""

import re
from collections.abc import Sequence

from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream
from jaxllm.parsers.tools.base import (
    Tool,
    ToolCallOutput,
    ToolFormat,
    read_content,
    read_end,
)
from jaxllm.parsers.tools.parameter_types import parameter_types, quote
from jaxllm.parsers.tools.parameter_value import ParameterValue

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"

_BEGIN = Markers(_CALL, _FUNCTION)
_AFTER_VALUE = Markers(_PARAMETER, _END_FUNCTION, _END_CALL, _CALL, _FUNCTION)
_END_VALUE = Markers(_END_PARAMETER, f"\n{_PARAMETER}", f"\n{_END_FUNCTION}", f"\n{_END_CALL}")
_NAME = re.compile(r"[^\s<>]*")


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    while (yield from read_content(text, out, _BEGIN)):
        if (yield from text.accept(_CALL, out.form)):
            yield from text.take_while(SPACE, out.form)
        if not (yield from text.accept(_FUNCTION, out.form)):
            continue
        name = yield from text.collect(_NAME, out.form)
        if name and (yield from text.accept(">", out.form)):
            out.begin_call(name)
            yield from _read_parameters(text, out, parameter_types(tools, name))
            out.end_call()
            yield from read_end(text, out, _END_CALL)


def _read_parameters(
    text: TextStream, out: ToolCallOutput, types: dict[str, frozenset[str]]
) -> Reading[None]:
    out.arguments("{")
    separator = ""
    while True:
        yield from text.take_while(SPACE, out.form)
        if (yield from text.accept(_PARAMETER, out.form, may_be_cut_off=True)):
            name = yield from text.collect(_NAME, out.form)
            if name and (yield from text.accept(">", out.form)):
                out.arguments(f"{separator}{quote(name)}: ")
                separator = ", "
                value = ParameterValue(types.get(name), out.arguments)
                yield from _read_value(text, value)
            elif (yield from text.peek()):
                out.content(_PARAMETER + name)
            else:
                return  # cut off: the brace stays open
            continue
        if (yield from text.accept(_END_FUNCTION, out.form, may_be_cut_off=True)):
            break
        marker = yield from text.take_until(_AFTER_VALUE, out.content)
        if marker is None:
            return
        if marker in (_END_CALL, _CALL, _FUNCTION):
            break
    out.arguments("}")


def _read_value(text: TextStream, value: ParameterValue) -> Reading[None]:
    while (marker := (yield from text.take_until(_END_VALUE, value.write))) is not None:
        if marker != _END_PARAMETER:
            text.take(value.write)  # the line break
            break
        closing: list[str] = []
        yield from text.accept(_END_PARAMETER, closing.append)
        yield from text.take_while(SPACE, closing.append)
        if (yield from _at_end_of_value(text)):
            break
        value.write("".join(closing))
    value.end(is_whole=marker is not None)


def _at_end_of_value(text: TextStream) -> Reading[bool]:
    if not (yield from text.peek()):
        return True
    for tag in _AFTER_VALUE.literals:
        if (yield from text.starts_with(tag, may_be_cut_off=True)):
            return True
    return False


QWEN3_XML = ToolFormat(_read, needs_special_tokens=True)

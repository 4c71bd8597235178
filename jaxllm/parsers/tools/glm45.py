"""The format of GLM 4.5 and later: tags around the names and the values of parameters.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

From GLM 4.7 on there are no line breaks between the tags. The parser writes the arguments as JSON,
by the types in the tool's schema. Parameters that are not in the schema are strings. A value ends
at </arg_value> if another tag or the end of the answer follows, or at a line that begins with one.
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
from jaxllm.parsers.tools.parameter_value import ParameterValue, ValueTags, read_tagged_value

_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"

_BEGIN = Markers(_CALL)
_NAME = re.compile(r"[\w.-]*")
_KEY_NAME = re.compile(r"[^<]*")
_VALUE_TAGS = ValueTags(_END_VALUE, (_KEY, _END_CALL, _CALL), (_KEY, _END_CALL))


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    while (yield from read_content(text, out, _BEGIN)):
        yield from text.accept(_CALL, out.form)
        yield from text.take_while(SPACE, out.form)
        name = yield from text.collect(_NAME, out.form)
        yield from text.take_while(SPACE, out.form)
        has_parameters = yield from text.starts_with(_KEY)
        if name and (has_parameters or (yield from text.starts_with(_END_CALL))):
            out.begin_call(name)
            yield from _read_parameters(text, out, parameter_types(tools, name))
            out.end_call()
            yield from read_end(text, out, _END_CALL)


def _read_parameters(
    text: TextStream, out: ToolCallOutput, types: dict[str, frozenset[str]]
) -> Reading[None]:
    out.arguments("{")
    separator = ""
    while (yield from text.accept(_KEY, out.form, may_be_cut_off=True)):
        key: list[str] = [_KEY]
        name = (yield from text.collect(_KEY_NAME, key.append)).strip()
        yield from text.accept(_END_KEY, key.append, may_be_cut_off=True)
        yield from text.take_while(SPACE, key.append)
        if not (yield from text.accept(_VALUE, out.form, may_be_cut_off=True)):
            if (yield from text.peek()):
                out.content("".join(key))
            return  # the brace stays open
        out.arguments(f"{separator}{quote(name)}: ")
        separator = ", "
        value = ParameterValue(types.get(name), out.arguments, num_line_breaks=0)
        yield from read_tagged_value(text, value, _VALUE_TAGS)
        yield from text.take_while(SPACE, out.form)
    if (yield from text.peek()):
        out.arguments("}")


GLM45 = ToolFormat(_read, needs_special_tokens=True)

"""The formats of Qwen 3 Coder and Seed OSS: each parameter's value is plain text between tags.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

    <seed:tool_call>
    <function=get_weather>
    <parameter=city>Paris</parameter>
    </function>
    </seed:tool_call>

The parser writes the arguments as JSON, by the types in the tool's schema. Parameters that are not
in the schema are strings. Qwen writes a value on lines of its own: one line break at each end
belongs to the tags. Seed does not, and all line breaks belong to the value.

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
from jaxllm.parsers.tools.parameter_value import ParameterValue, ValueTags, read_tagged_value

_FUNCTION, _END_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_PARAMETER = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^\s<>]*")


class _XmlCalls:
    """The format with these tags around a call."""

    def __init__(self, open_tag: str, close_tag: str, num_line_breaks: int):
        """`num_line_breaks` is the number of line breaks at each end of a value that belong to its
        tags."""
        self._open = open_tag
        self._close = close_tag
        self._num_line_breaks = num_line_breaks
        self._begin = Markers(open_tag, _FUNCTION)
        after_value = (_PARAMETER, _END_FUNCTION, close_tag, open_tag, _FUNCTION)
        self._after_value = Markers(*after_value)
        self._value_tags = ValueTags(
            _END_PARAMETER, after_value, (_PARAMETER, _END_FUNCTION, close_tag)
        )

    def read(self, text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
        while (yield from read_content(text, out, self._begin)):
            if (yield from text.accept(self._open, out.form)):
                yield from text.take_while(SPACE, out.form)
            if not (yield from text.accept(_FUNCTION, out.form)):
                continue
            name = yield from text.collect(_NAME, out.form)
            if name and (yield from text.accept(">", out.form)):
                out.begin_call(name)
                yield from self._read_parameters(text, out, parameter_types(tools, name))
                out.end_call()
                yield from read_end(text, out, self._close)

    def _read_parameters(
        self, text: TextStream, out: ToolCallOutput, types: dict[str, frozenset[str]]
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
                    value = ParameterValue(
                        types.get(name), out.arguments, num_line_breaks=self._num_line_breaks
                    )
                    yield from read_tagged_value(text, value, self._value_tags)
                elif (yield from text.peek()):
                    out.content(_PARAMETER + name)
                else:
                    return  # cut off: the brace stays open
                continue
            if (yield from text.accept(_END_FUNCTION, out.form, may_be_cut_off=True)):
                break
            marker = yield from text.take_until(self._after_value, out.content)
            if marker is None:
                return
            if marker in (self._close, self._open, _FUNCTION):
                break
        out.arguments("}")


QWEN3_XML = ToolFormat(
    _XmlCalls("<tool_call>", "</tool_call>", num_line_breaks=1).read, needs_special_tokens=True
)
SEED_OSS = ToolFormat(
    _XmlCalls("<seed:tool_call>", "</seed:tool_call>", num_line_breaks=0).read,
    needs_special_tokens=True,
)

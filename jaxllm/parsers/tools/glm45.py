"""The formats of GLM 4.5 and later, and of Hy3: tags around the names and the values of parameters.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

    <tool_calls>
    <tool_call>get_weather<tool_sep>
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>
    </tool_calls>

From GLM 4.7 on there are no line breaks between the tags. The tags of some Hy3 end in a word of the
release: <tool_call:opensource>. The parser writes the arguments as JSON, by the types in the tool's
schema. Parameters that are not in the schema are strings. A value ends at </arg_value> if another
tag or the end of the answer follows, or at a line that begins with one.
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

_NAME = re.compile(r"[\w.-]*")
_KEY_NAME = re.compile(r"[^<]*")


class _Tags:
    """The tags of a format, each with this word at its end."""

    def __init__(self, word: str = "", *, has_outer: bool = False):
        def tag(name: str) -> str:
            return f"<{name}{word}>"

        # Around all calls, and behind a call's name; "" if the format has none.
        self.calls, self.end_calls, self.end_name = (
            (tag("tool_calls"), tag("/tool_calls"), tag("tool_sep")) if has_outer else ("", "", "")
        )
        self.call, self.end_call = tag("tool_call"), tag("/tool_call")
        self.key, self.end_key = tag("arg_key"), tag("/arg_key")
        self.value, end_value = tag("arg_value"), tag("/arg_value")
        self.of_value = ValueTags(
            end_value, (self.key, self.end_call, self.call), (self.key, self.end_call)
        )


class _KeyedCalls:
    """A format whose tags are one of these sets."""

    def __init__(self, *tags: _Tags):
        self._begins = {one.calls: one for one in tags if one.calls}
        self._begins |= {one.call: one for one in tags}
        self._markers = Markers(*self._begins)

    def read(self, text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
        while (marker := (yield from read_content(text, out, self._markers))) is not None:
            tags = self._begins[marker]
            if marker == tags.calls:
                yield from text.accept(tags.calls, out.form)
                yield from text.take_while(SPACE, out.form)
            if (yield from text.accept(tags.call, out.form)):
                yield from _read_call(text, out, tools, tags)


def _read_call(
    text: TextStream, out: ToolCallOutput, tools: Sequence[Tool], tags: _Tags
) -> Reading[None]:
    """Read a call behind its first tag, if it is one."""
    yield from text.take_while(SPACE, out.form)
    name = yield from text.collect(_NAME, out.form)
    yield from text.take_while(SPACE, out.form)
    if tags.end_name:
        if not (yield from text.accept(tags.end_name, out.form)):
            return
        yield from text.take_while(SPACE, out.form)
    has_parameters = yield from text.starts_with(tags.key)
    if name and (has_parameters or (yield from text.starts_with(tags.end_call))):
        out.begin_call(name)
        yield from _read_parameters(text, out, parameter_types(tools, name), tags)
        out.end_call()
        yield from read_end(text, out, tags.end_call)
        if tags.end_calls:
            yield from read_end(text, out, tags.end_calls)


def _read_parameters(
    text: TextStream, out: ToolCallOutput, types: dict[str, frozenset[str]], tags: _Tags
) -> Reading[None]:
    out.arguments("{")
    separator = ""
    while (yield from text.accept(tags.key, out.form, may_be_cut_off=True)):
        key: list[str] = [tags.key]
        name = (yield from text.collect(_KEY_NAME, key.append)).strip()
        yield from text.accept(tags.end_key, key.append, may_be_cut_off=True)
        yield from text.take_while(SPACE, key.append)
        if not (yield from text.accept(tags.value, out.form, may_be_cut_off=True)):
            if (yield from text.peek()):
                out.content("".join(key))
            return  # the brace stays open
        out.arguments(f"{separator}{quote(name)}: ")
        separator = ", "
        value = ParameterValue(types.get(name), out.arguments, num_line_breaks=0)
        yield from read_tagged_value(text, value, tags.of_value)
        yield from text.take_while(SPACE, out.form)
    if (yield from text.peek()):
        out.arguments("}")


GLM45 = ToolFormat(_KeyedCalls(_Tags()).read, needs_special_tokens=True)
HY_V3 = ToolFormat(
    _KeyedCalls(_Tags(has_outer=True), _Tags(":opensource", has_outer=True)).read,
    needs_special_tokens=True,
)

"""The format of xLAM: an array of calls, which is the whole answer or follows a marker.

    [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_call>

Reasoning may come before it, which a reasoning parser takes away.
"""

from collections.abc import Sequence

from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream
from jaxllm.parsers.tools.base import Tool, ToolCallOutput, ToolFormat, read_content, read_end
from jaxllm.parsers.tools.json_call import read_calls

_TAG, _END_TAG, _MARKER = "<tool_call>", "</tool_call>", "[TOOL_CALLS]"
_BEGIN = Markers(_TAG, _MARKER)


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    yield from text.take_while(SPACE, out.form)
    if (yield from text.peek()) == "[" and not (yield from text.starts_with(_MARKER)):
        yield from read_calls(text, out, is_announced=False)
    while (marker := (yield from read_content(text, out, _BEGIN))) is not None:
        yield from text.accept(marker, out.form)
        yield from text.take_while(SPACE, out.form)
        end = _END_TAG if marker == _TAG else _MARKER
        if (yield from read_calls(text, out, end_marker=end)) and marker == _TAG:
            yield from read_end(text, out, _END_TAG)


XLAM = ToolFormat(_read, needs_special_tokens=True)

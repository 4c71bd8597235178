"""The format of Hermes 2 Pro, Qwen 2.5 and Qwen 3: one JSON object between each pair of tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from collections.abc import Sequence

from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream
from jaxllm.parsers.tools.base import (
    Tool,
    ToolCallOutput,
    ToolFormat,
    read_content,
    read_end,
)
from jaxllm.parsers.tools.json_call import read_call

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_MARKERS = Markers(_OPEN)


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    while (yield from read_content(text, out, _MARKERS)):
        yield from text.accept(_OPEN, out.form)
        yield from text.take_while(SPACE, out.form)
        if (yield from text.peek()) != "{":
            continue
        if (yield from read_call(text, out, end_marker=_CLOSE, is_announced=True)):
            yield from read_end(text, out, _CLOSE)


HERMES = ToolFormat(_read, needs_special_tokens=True)

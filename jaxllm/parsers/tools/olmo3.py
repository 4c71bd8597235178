"""The format of OLMo 3: calls in Python, one on each line.

<function_calls>
get_weather(city="Paris", days=3)
get_time()
</function_calls>
"""

from collections.abc import Sequence

from jaxllm.parsers.text_stream import Markers, Reading, TextStream
from jaxllm.parsers.tools.base import (
    Tool,
    ToolCallOutput,
    ToolFormat,
    read_content,
    read_end,
)
from jaxllm.parsers.tools.python_call import read_call

_OPEN, _CLOSE = "<function_calls>", "</function_calls>"
_MARKERS = Markers(_OPEN)


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    while (yield from read_content(text, out, _MARKERS)):
        yield from text.accept(_OPEN, out.form)
        while (yield from read_call(text, out)):
            if (yield from read_end(text, out, _CLOSE)):
                break


OLMO3 = ToolFormat(_read, needs_special_tokens=True)

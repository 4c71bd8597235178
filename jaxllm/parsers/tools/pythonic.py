"""The formats that write a list of calls in Python.

    [get_weather(city='Paris', units="metric"), get_time()]
    <|tool_call_start|>[get_time()]<|tool_call_end|>

Llama 3.2 and 4 and ToolACE begin the answer with the list, or write it after <|python_start|>; LFM2
writes it between tags.
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
from jaxllm.parsers.tools.python_call import read_call


def _list_format(open_tag: str, close_tag: str) -> ToolFormat:
    """Make the format of a list at the beginning of the answer or between these tags."""
    begin = Markers(open_tag)

    def read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.take_while(SPACE, out.form)
        while True:
            yield from _read_list(text, out, close_tag)
            if (yield from read_content(text, out, begin)) is None:
                return
            yield from text.accept(open_tag, out.form)
            yield from text.take_while(SPACE, out.form)

    return ToolFormat(read, needs_special_tokens=True)


def _read_list(text: TextStream, out: ToolCallOutput, close_tag: str) -> Reading[None]:
    if not (yield from text.accept("[", out.form)):
        return
    while (yield from read_call(text, out)):
        yield from read_end(text, out, ",")
        if (yield from read_end(text, out, "]")):
            yield from read_end(text, out, close_tag)
            return


PYTHONIC = _list_format("<|python_start|>", "<|python_end|>")
LFM2 = _list_format("<|tool_call_start|>", "<|tool_call_end|>")

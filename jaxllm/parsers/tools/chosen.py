"""Calls that a request has asked for by `tool_choice`, in a form that its grammar gives.

Any tool: `[{"name": "get_weather", "parameters": {"city": "Paris"}}]`. One tool by its name: the
answer is the call's arguments, `{"city": "Paris"}`. No model has these formats of its own.
"""

import re
from collections.abc import Sequence

from jaxllm.parsers.text_stream import SPACE, Reading, TextStream
from jaxllm.parsers.tools.base import Tool, ToolCallOutput, ToolFormat
from jaxllm.parsers.tools.json_call import read_calls

_ANYTHING = re.compile(r"(?s:.*)")


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    yield from text.take_while(SPACE, out.form)
    yield from read_calls(text, out)
    yield from text.take_while(_ANYTHING, out.content)


ANY_CALL = ToolFormat(_read, needs_special_tokens=False)


def call_of(name: str) -> ToolFormat:
    """The format of answers that are the arguments of this function."""

    def read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
        yield from text.take_while(SPACE, out.form)
        if (yield from text.peek()):
            out.begin_call(name)
            yield from text.take_while(_ANYTHING, out.arguments)
            out.end_call()

    return ToolFormat(read, needs_special_tokens=False)

"""The format of Kimi K2: JSON arguments behind an id, which has the name.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0
    <|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>

The number counts the calls of a conversation. The chat template expects the id as it is.
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
from jaxllm.parsers.tools.json_call import read_value

_CALLS, _END_CALLS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _END_CALL = "<|tool_call_begin|>", "<|tool_call_end|>"
_ARGUMENTS = "<|tool_call_argument_begin|>"

_BEGIN = Markers(_CALLS, _CALL)
_ID = re.compile(r"[^\s<{]*")


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    while (yield from read_content(text, out, _BEGIN)):
        yield from text.accept(_CALLS, out.form)
        num_calls = 0
        while (yield from _read_call(text, out)):
            num_calls += 1
        if num_calls:
            yield from read_end(text, out, _END_CALLS)


def _read_call(text: TextStream, out: ToolCallOutput) -> Reading[bool]:
    """Read one call. Return False if there is none, or if its end is missing."""
    yield from text.take_while(SPACE, out.form)
    if not (yield from text.accept(_CALL, out.form)):
        return False
    yield from text.take_while(SPACE, out.form)
    call_id = yield from text.collect(_ID, out.form)
    name = call_id.removeprefix("functions.").rpartition(":")[0] or call_id
    yield from text.take_while(SPACE, out.form)
    if not (yield from text.accept(_ARGUMENTS, out.form)):
        return False
    yield from text.take_while(SPACE, out.form)
    if not name or (yield from text.peek()) != "{":
        return False
    out.begin_call(name, call_id)
    yield from read_value(text, out.arguments, _END_CALL)
    out.end_call()
    return (yield from read_end(text, out, _END_CALL))


KIMI_K2 = ToolFormat(_read, needs_special_tokens=True)

"""The formats of Granite 3, an array after a marker, and of Granite 20B, an object after a marker.

    <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]
    <function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}

The marker of Granite 3.1 is <tool_call>. Granite 3 may leave it out at the beginning of the answer.
"""

from collections.abc import Sequence

from jaxllm.parsers.text_stream import SPACE, Reading, TextStream
from jaxllm.parsers.tools.announced_json import CALL, END_CALL, announced_json, array_form
from jaxllm.parsers.tools.base import CallForm, Tool, ToolCallOutput, ToolFormat
from jaxllm.parsers.tools.json_call import read_calls

_ANNOUNCED = announced_json("<|tool_call|>", "<tool_call>")


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    yield from text.take_while(SPACE, out.form)
    if (yield from text.peek()) == "[":
        yield from read_calls(text, out, is_announced=False)
    yield from _ANNOUNCED.read(text, out, tools)


GRANITE = ToolFormat(
    _read,
    needs_special_tokens=True,
    forms=(array_form("<|tool_call|>"), array_form("<tool_call>")),
)
GRANITE_20B_FC = announced_json(
    "<function_call>", forms=(CallForm("<function_call>", CALL, END_CALL, opening=" "),)
)

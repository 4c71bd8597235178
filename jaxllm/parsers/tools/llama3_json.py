"""The format of Llama 3.1 and later: JSON objects at the beginning of the answer or after a tag.

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}

JSON in the middle of text is not a call: a call without a tag is at the beginning of the answer or
follows another call.
"""

import re
from collections.abc import Sequence

from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream
from jaxllm.parsers.tools.base import CallForm, Tool, ToolCallOutput, ToolFormat, read_content
from jaxllm.parsers.tools.json_call import read_call

_TAG = "<|python_tag|>"
_MARKERS = Markers(_TAG)
_BETWEEN_CALLS = re.compile(r"[\s;,]*")


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    yield from text.take_while(SPACE, out.form)
    while True:
        while (yield from text.peek()) == "{":
            if not (yield from read_call(text, out, is_announced=False)):
                break
            yield from text.take_while(_BETWEEN_CALLS, out.form)
        if (yield from read_content(text, out, _MARKERS)) is None:
            return
        yield from text.accept(_TAG, out.form)
        yield from text.take_while(SPACE, out.form)


_CALL, _END = '{"name": "NAME", "parameters": ', "}"

LLAMA3_JSON = ToolFormat(
    _read,
    needs_special_tokens=True,
    forms=(
        CallForm("", _CALL, _END, separator="; "),
        CallForm(_TAG, _CALL, _END, separator="; "),
    ),
)

"""The formats of DeepSeek V3 and R1, with the JSON in a code block, and of V3.1, without.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}
    <｜tool▁call▁end｜><｜tool▁calls▁end｜>

The text after the separator distinguishes them.
"""

import re
from collections.abc import Sequence

from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream
from jaxllm.parsers.tools.base import (
    CallForm,
    Tool,
    ToolCallOutput,
    ToolFormat,
    read_content,
    read_end,
)
from jaxllm.parsers.tools.json_call import read_value

_CALLS, _END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SEPARATOR = "<｜tool▁sep｜>"

_MARKERS = Markers(_CALLS)
_NAME = re.compile(r"[^\s<{`]*")


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    while (yield from read_content(text, out, _MARKERS)):
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
    name = yield from text.collect(_NAME, out.form)
    if not (yield from text.accept(_SEPARATOR, out.form)):
        return False
    if (yield from text.peek()) != "{":
        name = yield from text.collect(_NAME, out.form)  # before the separator was "function"
        yield from text.take_while(SPACE, out.form)
        yield from text.accept("```json", out.form)
        yield from text.take_while(SPACE, out.form)
    if not name or (yield from text.peek()) != "{":
        return False
    out.begin_call(name)
    yield from read_value(text, out.arguments, _END_CALL)
    out.end_call()
    yield from read_end(text, out, "```")
    return (yield from read_end(text, out, _END_CALL))


DEEPSEEK_V3 = ToolFormat(
    _read,
    needs_special_tokens=True,
    forms=(
        CallForm(
            _CALLS,
            f"{_CALL}function{_SEPARATOR}NAME\n```json\n",
            f"\n```{_END_CALL}",
            separator="\n",
            closing=_END_CALLS,
        ),
        CallForm(_CALLS, f"{_CALL}NAME{_SEPARATOR}", _END_CALL, separator="", closing=_END_CALLS),
    ),
)

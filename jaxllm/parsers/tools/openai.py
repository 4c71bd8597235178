"""The format of gpt-oss: a call is a message of Harmony (`jaxllm.parsers.harmony`) to a function.

    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
    {"city": "Paris"}<|call|>

The header is on one line with the arguments. The answer begins inside a header, so its first
message lacks `<|start|>assistant`, and may begin with ` to=`. Other messages are content, with
their headers, if no reasoning parser has taken them away.
"""

from collections.abc import Sequence

from jaxllm.parsers.harmony import (
    BODY_ENDS,
    FUNCTIONS,
    HEADERS,
    RECIPIENT,
    read_end,
    read_header,
)
from jaxllm.parsers.text_stream import SPACE, Reading, TextStream
from jaxllm.parsers.tools.base import Tool, ToolCallOutput, ToolFormat, read_content


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    yield from text.take_while(SPACE, out.form)
    if (yield from text.starts_with(RECIPIENT + FUNCTIONS)):
        yield from _read_message(text, out)
    while (yield from read_content(text, out, HEADERS)) is not None:
        yield from _read_message(text, out)


def _read_message(text: TextStream, out: ToolCallOutput) -> Reading[None]:
    header = yield from read_header(text, out.form)
    if header is None:
        yield from read_end(text, out.form)
    elif header.function:
        out.begin_call(header.function)
        yield from text.take_until(BODY_ENDS, out.arguments)
        out.end_call()
        yield from read_end(text, out.form)
        out.drop_form()


OPENAI = ToolFormat(_read, needs_special_tokens=True)

"""The formats of Mistral: [TOOL_CALLS], then an array of calls, or the name of one call.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}
    [TOOL_CALLS]get_weather[CALL_ID]9Ae3bDc2F[ARGS]{"city": "Paris"}

Tokenizers before version 11 use the first format. Ids are nine letters or digits: Mistral's chat
templates refuse other ids when the next request contains the call.
"""

import re
import secrets
import string
from collections.abc import Sequence

from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream
from jaxllm.parsers.tools.announced_json import array_form
from jaxllm.parsers.tools.base import CallForm, Tool, ToolCallOutput, ToolFormat, read_content
from jaxllm.parsers.tools.json_call import read_calls, read_value

_CALLS = "[TOOL_CALLS]"
_MARKERS = Markers(_CALLS)
_NAME = re.compile(r"[^\s\[\]{}]*")
_LETTERS_AND_DIGITS = string.ascii_letters + string.digits
_ID = re.compile(r"[A-Za-z0-9]*")
_ID_SIZE = 9


def _read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
    while (yield from read_content(text, out, _MARKERS)):
        yield from text.accept(_CALLS, out.form)
        yield from text.take_while(SPACE, out.form)
        if (yield from text.peek()) in ("{", "["):
            yield from read_calls(text, out, end_marker=_CALLS)
        else:
            yield from _read_named(text, out)


def _read_named(text: TextStream, out: ToolCallOutput) -> Reading[None]:
    name = yield from text.collect(_NAME, out.form)
    if not name:
        return
    call_id = ""
    if (yield from text.accept("[CALL_ID]", out.form)):
        call_id = yield from text.collect(_ID, out.form)
    yield from text.accept("[ARGS]", out.form)
    yield from text.take_while(SPACE, out.form)
    if (yield from text.peek()) == "{":
        out.begin_call(name, call_id if len(call_id) == _ID_SIZE else None)
        yield from read_value(text, out.arguments, _CALLS)
        out.end_call()


def _new_call_id() -> str:
    return "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(_ID_SIZE))


MISTRAL = ToolFormat(
    _read,
    needs_special_tokens=True,
    new_call_id=_new_call_id,
    # Which one it is depends on the tokenizer, and the model knows it.
    forms=(
        array_form(_CALLS),
        array_form(_CALLS)._replace(opening=" ["),
        CallForm(_CALLS, "NAME", ""),
        CallForm(_CALLS, "NAME[ARGS]", ""),
    ),
)

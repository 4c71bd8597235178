"""The formats that announce calls in JSON by a marker: one object, or an array of them."""

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
from jaxllm.parsers.tools.json_call import read_calls


def announced_json(
    *markers: str,
    close: str | None = None,
    name_key: str = "name",
    forms: tuple[CallForm, ...] = (),
) -> ToolFormat:
    """Make the format with these markers and this marker after the JSON, if there is one.

    A call whose brackets stay open ends at `close`, or without it at the next marker.
    """
    begin = Markers(*markers)

    def read(text: TextStream, out: ToolCallOutput, tools: Sequence[Tool]) -> Reading[None]:
        while (marker := (yield from read_content(text, out, begin))) is not None:
            yield from text.accept(marker, out.form)
            yield from text.take_while(SPACE, out.form)
            has_calls = yield from read_calls(
                text, out, end_marker=close or marker, name_key=name_key
            )
            if has_calls and close:
                yield from read_end(text, out, close)

    return ToolFormat(read, needs_special_tokens=True, forms=forms)


# A call as most models write it.
CALL, END_CALL = '{"name": "NAME", "arguments": ', "}"


def array_form(trigger: str, closing: str = "") -> CallForm:
    """An array of calls after a trigger."""
    return CallForm(trigger, CALL, END_CALL, opening="[", separator=", ", closing=f"]{closing}")

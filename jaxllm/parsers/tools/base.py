"""The parser of tool calls, which is common to all formats. A format is a function that reads.

Rules for every format:
- Text that may become a call is held back until that is certain. Then the call's name is sent, and
  its arguments are streamed. Text that is not a call becomes content, unchanged.
- A call that violates its form ends there, with the arguments so far, and content continues. A call
  that the end of the answer cuts off ends likewise. Its arguments are invalid JSON, so that the
  client does not run an incomplete call.
- White space before, between and after calls is not content, unless other content is beside it.
- Arguments in JSON are passed on unchanged.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxllm.errors import refused
from jaxllm.parsers.deltas import DeltaWriter, ToolCallDelta
from jaxllm.parsers.stream_parser import StreamParser
from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream


class Tool(NamedTuple):
    """A function that the request offers, and the JSON schema of its parameters."""

    name: str
    parameters: Mapping[str, object]

    @classmethod
    def of(cls, tool: object) -> "Tool":
        """Read a tool in OpenAI's form; raise ValidationError for any other form."""
        match tool:
            case {"function": {"name": str(name), **function}}:
                return cls(name, function.get("parameters") or {})
        form = "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
        raise refused("tools", tool, f"a tool has the form {form}")


def new_call_id() -> str:
    """Make an id like OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallOutput:
    """Takes the output of a format while the format reads."""

    def __init__(self, deltas: DeltaWriter, new_id: Callable[[], str]):
        self._deltas = deltas
        self._new_id = new_id
        self._held: list[str] = []  # becomes content, unless it becomes a call
        self._num_calls = 0
        self.in_call = False

    def content(self, text: str) -> None:
        """Write content. Held text becomes content, too."""
        self._release()
        self._deltas.content(text)

    def form(self, text: str) -> None:
        """Hold text that belongs to the form of a call. Within a call, drop it."""
        if not self.in_call:
            self._held.append(text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """Begin a call and drop the held text, which was its form."""
        assert not self.in_call, name
        self._held.clear()
        self._deltas.tool_call(ToolCallDelta(self._num_calls, call_id or self._new_id(), name))
        self._num_calls += 1
        self.in_call = True

    def arguments(self, text: str) -> None:
        """Write the next piece of the open call's arguments."""
        assert self.in_call, text
        self._deltas.arguments(self._num_calls - 1, text)

    def end_call(self) -> None:
        """End the open call."""
        self.in_call = False

    def drop_form(self) -> None:
        """Drop the held text, which was the end of a call."""
        self._held.clear()

    def release(self) -> None:
        """Make held text content. Hold white space alone, because a call may follow it."""
        if not self._holds_space():
            self._release()

    def end(self) -> None:
        """End the answer. White space at the end is dropped after calls."""
        if not (self._num_calls and self._holds_space()):
            self._release()

    def _holds_space(self) -> bool:
        return all(not text or text.isspace() for text in self._held)

    def _release(self) -> None:
        if self._held:
            self._deltas.content("".join(self._held))
            self._held.clear()


class CallForm(NamedTuple):
    """How a format writes calls whose arguments are JSON, for grammars: the trigger and the opening
    once, then `begin`, the arguments and `end` of each call. NAME in `begin` is the function's
    name."""

    trigger: str  # the text is free until it comes; "" if a call begins the answer
    begin: str
    end: str
    opening: str = ""
    separator: str | None = None  # between calls after one opening; None: there is one call
    closing: str = ""


class ToolFormat(NamedTuple):
    """A format of tool calls. `read` reads a whole answer, including the text between calls."""

    read: Callable[[TextStream, ToolCallOutput, Sequence[Tool]], Reading[None]]
    # In some models its markers are special tokens: decode the answer with
    # skip_special_tokens=False.
    needs_special_tokens: bool
    new_call_id: Callable[[], str] = new_call_id
    forms: tuple[CallForm, ...] = ()  # none if the arguments are not JSON


def tool_parser(tool_format: ToolFormat, tools: Sequence[Tool]) -> StreamParser:
    """Make a parser that separates one answer's content from its tool calls."""
    text, deltas = TextStream(), DeltaWriter()
    out = ToolCallOutput(deltas, tool_format.new_call_id)

    def read() -> Reading[None]:
        yield from tool_format.read(text, out, tools)
        out.end()

    return StreamParser(text, deltas, read())


def read_content(text: TextStream, out: ToolCallOutput, markers: Markers) -> Reading[str | None]:
    """Read content up to a marker. Return the marker without reading it; None at the end.

    Held text becomes content, unless it is white space.
    """
    out.release()
    yield from text.take_while(SPACE, out.form)
    return (yield from text.take_until(markers, out.content))


def read_end(text: TextStream, out: ToolCallOutput, marker: str) -> Reading[bool]:
    """Read the end marker of a call, and white space before it, if it comes next."""
    out.release()
    yield from text.take_while(SPACE, out.form)
    found = yield from text.accept(marker, out.form, may_be_cut_off=True)
    if found:
        out.drop_form()
    return found

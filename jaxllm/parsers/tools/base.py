"""The parser of tool calls: the same for all formats, which differ in how they read.

Rules that hold for every format:
- Text that may become a call is held back until it is certain; then the call's name is sent, and
  its arguments as they come. Text that turns out to be no call becomes content, to the letter.
- Where a call has begun and then breaks its form, it ends there, with the arguments as far as they
  came, and content goes on. The same for a call that is cut off by the end of the answer, so that
  the client sees arguments that are no JSON and does not run half of a call.
- White space before, between and after calls is no content, if there is nothing else.
- Arguments in JSON are passed on as the model wrote them.
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
        """From OpenAI's form, which chat templates take, too; raises ValidationError."""
        match tool:
            case {"function": {"name": str(name), **function}}:
                return cls(name, function.get("parameters") or {})
        form = "{'type': 'function', 'function': {'name': ..., 'parameters': {...}}}"
        raise refused("tools", tool, f"a tool has the form {form}")


def new_call_id() -> str:
    """An id in the manner of OpenAI's."""
    return f"call_{secrets.token_hex(12)}"


class ToolCallOutput:
    """What a format writes while it reads."""

    def __init__(self, deltas: DeltaWriter, new_id: Callable[[], str]):
        self._deltas = deltas
        self._new_id = new_id
        self._held: list[str] = []  # content, unless a call comes of it
        self._num_calls = 0
        self.in_call = False

    def content(self, text: str) -> None:
        """Text for the user; what is held before it is, too."""
        self._release()
        self._deltas.content(text)

    def form(self, text: str) -> None:
        """Text that belongs to the form of a call: held until the call begins, then nothing."""
        if not self.in_call:
            self._held.append(text)

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        """The text that is held is a call."""
        assert not self.in_call, name
        self._held.clear()
        self._deltas.tool_call(ToolCallDelta(self._num_calls, call_id or self._new_id(), name))
        self._num_calls += 1
        self.in_call = True

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that is open."""
        assert self.in_call, text
        self._deltas.arguments(self._num_calls - 1, text)

    def end_call(self) -> None:
        """What follows belongs to no call."""
        self.in_call = False

    def drop_form(self) -> None:
        """What is held was the end of a call."""
        self._held.clear()

    def release(self) -> None:
        """No call comes of what is held. Space alone may still stand before one."""
        if not self._holds_space():
            self._release()

    def end(self) -> None:
        """The answer has ended. Space at its end is dropped if it was calls."""
        if not (self._num_calls and self._holds_space()):
            self._release()

    def _holds_space(self) -> bool:
        return all(not text or text.isspace() for text in self._held)

    def _release(self) -> None:
        if self._held:
            self._deltas.content("".join(self._held))
            self._held.clear()


class ToolFormat(NamedTuple):
    """A way to write calls. `read` reads a whole answer, text between calls included."""

    read: Callable[[TextStream, ToolCallOutput, Sequence[Tool]], Reading[None]]
    # Some of its markers are special tokens in models that use it: decode the answer with
    # skip_special_tokens=False.
    needs_special_tokens: bool
    new_call_id: Callable[[], str] = new_call_id


def tool_parser(tool_format: ToolFormat, tools: Sequence[Tool]) -> StreamParser:
    """A parser that separates one answer's content from its calls of tools."""
    text, deltas = TextStream(), DeltaWriter()
    out = ToolCallOutput(deltas, tool_format.new_call_id)

    def read() -> Reading[None]:
        yield from tool_format.read(text, out, tools)
        out.end()

    return StreamParser(text, deltas, read())


def read_content(text: TextStream, out: ToolCallOutput, markers: Markers) -> Reading[str | None]:
    """Read content up to a marker and return the marker, which stays; None at the end.

    What is held is content now, unless it is space, which waits for what follows it.
    """
    out.release()
    yield from text.take_while(SPACE, out.form)
    return (yield from text.take_until(markers, out.content))


def read_end(text: TextStream, out: ToolCallOutput, marker: str) -> Reading[bool]:
    """Read the marker at the end of a call, and space before it, if it comes next."""
    out.release()
    yield from text.take_while(SPACE, out.form)
    found = yield from text.accept(marker, out.form, may_be_cut_off=True)
    if found:
        out.drop_form()
    return found

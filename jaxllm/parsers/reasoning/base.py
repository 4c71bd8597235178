"""What a reasoning parser is: it separates an answer's reasoning from its content.

The prompt shows whether the reasoning has begun: a chat template may open it, or open and close it
when thinking is turned off.
"""

import enum
from typing import NamedTuple, Protocol

from jaxllm.parsers.deltas import DeltaWriter
from jaxllm.parsers.stream_parser import StreamParser
from jaxllm.parsers.text_stream import Reading, TextStream


class Start(enum.Enum):
    """Where an answer begins."""

    REASONING = enum.auto()
    CONTENT = enum.auto()
    TAGGED_CONTENT = enum.auto()  # after the tag that opens the content
    EITHER = enum.auto()  # the answer says it, by an opening tag


class ReasoningFormat(Protocol):
    """How a model family marks its reasoning."""

    @property
    def needs_special_tokens(self) -> bool:
        """Whether marks are special tokens in some models: decode the answer with
        skip_special_tokens=False."""
        ...

    def start(self, prompt: str, enable_thinking: bool | None) -> Start:
        """Where the answer to this prompt begins. `prompt` is the rendered prompt, or its end."""
        ...

    def read(self, text: TextStream, out: DeltaWriter, start: Start) -> Reading[None]:
        """Read a whole answer."""
        ...


class Reasoning(NamedTuple):
    """What is known of an answer's reasoning before the answer."""

    format: ReasoningFormat
    # Whether the template's switch is on; None if no template was told.
    enable_thinking: bool | None = None


def reasoning_parser(
    reasoning_format: ReasoningFormat, prompt: str = "", enable_thinking: bool = True
) -> StreamParser:
    """Make a parser that separates one answer's reasoning from its content.

    `prompt` is the rendered prompt, or its end. Without `enable_thinking` an answer has reasoning
    only if the model opens it all the same; some models write an empty one.
    """
    text, deltas = TextStream(), DeltaWriter()
    start = reasoning_format.start(prompt, enable_thinking)
    return StreamParser(text, deltas, reasoning_format.read(text, deltas, start))

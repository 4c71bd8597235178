"""gpt-oss: reasoning is the channel `analysis` of Harmony (`jaxllm.parsers.harmony`).

The channel `final` is content, and so is `commentary` for the user, which announces calls. A call
of a function passes on as content with its header, for the parser of tool calls. Messages to other
recipients are to tools that the model imagines, and are reasoning. A line break separates messages
of one kind. If an answer is cut off inside a header, the header is dropped.
"""

from typing import NamedTuple

from jaxllm.parsers.deltas import DeltaWriter
from jaxllm.parsers.harmony import (
    ANALYSIS,
    BODY_ENDS,
    ENDS,
    HEADERS,
    MESSAGE,
    RECIPIENT,
    START,
    Header,
    begins_header,
    read_end,
    read_header,
)
from jaxllm.parsers.reasoning.base import Start
from jaxllm.parsers.text_stream import Reading, Sink, TextStream


class HarmonyReasoning(NamedTuple):
    """Reasoning in a channel of its own."""

    needs_special_tokens: bool = True

    def start(self, prompt: str, enable_thinking: bool | None) -> Start:
        """Inside a message, if the prompt has begun one. There is no switch for the thinking."""
        header, has_body, body = prompt.rpartition(START)[2].partition(MESSAGE)
        channel = Header.of(header).channel
        if not has_body or not channel or any(end in body for end in ENDS):
            return Start.EITHER
        return Start.REASONING if channel == ANALYSIS else Start.CONTENT

    def read(self, text: TextStream, out: DeltaWriter, start: Start) -> Reading[None]:
        messages = _Messages(text, out)
        if start is not Start.EITHER:
            yield from messages.read_body(start is Start.REASONING)
        elif (yield from text.starts_with(f" {RECIPIENT}")):
            yield from messages.read_message()
        while (yield from text.take_until(HEADERS, out.content)) is not None:
            yield from messages.read_message()


class _Messages:
    """Reads the messages of one answer."""

    def __init__(self, text: TextStream, out: DeltaWriter):
        self._text = text
        self._out = out
        # The kinds of text of which there was a message.
        self._has_reasoning = self._has_content = False

    def read_message(self) -> Reading[None]:
        pieces: list[str] = []
        header = yield from read_header(self._text, pieces.append)
        written = "".join(pieces)
        if header is None:
            is_over = (yield from self._text.peek()) == ""
            if not (is_over and begins_header(written)):
                self._out.content(written)
                yield from read_end(self._text, self._out.content)
        elif header.function:
            self._out.content(written)
            yield from self._text.take_until(BODY_ENDS, self._out.content)
            yield from read_end(self._text, self._out.content)
        else:
            yield from self.read_body(header.channel == ANALYSIS or bool(header.recipient))

    def read_body(self, is_reasoning: bool) -> Reading[None]:
        """Read the text of a message, and its end."""
        if is_reasoning:
            sink, is_next, self._has_reasoning = self._out.reasoning, self._has_reasoning, True
        else:
            sink, is_next, self._has_content = self._out.content, self._has_content, True
        yield from self._text.take_until(BODY_ENDS, _separated(sink) if is_next else sink)
        yield from read_end(self._text, _drop)


def _separated(sink: Sink) -> Sink:
    """A sink that writes a line break before its first text."""
    separator = "\n"

    def write(text: str) -> None:
        nonlocal separator
        sink(separator + text)
        separator = ""

    return write


def _drop(text: str) -> None:
    """A sink for the ends of messages."""


OPENAI_GPTOSS = HarmonyReasoning()

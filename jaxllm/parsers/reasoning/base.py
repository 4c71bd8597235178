"""The reasoning parser: text between two tags is reasoning, and the text after them is content.

The prompt shows whether the reasoning has begun: a chat template may open it, or open and close it
when thinking is turned off. Line breaks between tags and text belong to neither reasoning nor
content. If an answer is cut off before the closing tag, all of it is reasoning.
"""

import re
from typing import NamedTuple

from jaxllm.parsers.deltas import DeltaWriter
from jaxllm.parsers.line_breaks import LineBreakTrimmer
from jaxllm.parsers.stream_parser import StreamParser
from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream


class ReasoningFormat(NamedTuple):
    """The tags of a model family and how the family uses them."""

    open_tag: str
    close_tag: str
    # Answers begin with reasoning even if neither the answer nor the prompt has the opening tag.
    starts_inside: bool
    # Markers that also end the reasoning, because some models forget to close it. They are content.
    other_ends: tuple[str, ...] = ()
    # In some models the tags are special tokens: decode the answer with skip_special_tokens=False.
    needs_special_tokens: bool = True


_LINE_BREAKS = re.compile(r"\n*")
_ANYTHING = re.compile(r"(?s:.*)")


def reasoning_parser(
    reasoning_format: ReasoningFormat, prompt: str = "", enable_thinking: bool = True
) -> StreamParser:
    """Make a parser that separates one answer's reasoning from its content.

    `prompt` is the rendered prompt, or its end. Without `enable_thinking` the whole answer is
    content.
    """
    text, deltas = TextStream(), DeltaWriter()
    is_closed = prompt.rstrip().endswith(reasoning_format.close_tag)
    if is_closed or not enable_thinking:
        reading = text.take_while(_ANYTHING, deltas.content)
    else:
        is_open = prompt.rstrip().endswith(reasoning_format.open_tag)
        is_inside = is_open or reasoning_format.starts_inside
        reading = _read(text, deltas, reasoning_format, is_inside)
    return StreamParser(text, deltas, reading)


def _read(
    text: TextStream, out: DeltaWriter, tags: ReasoningFormat, is_inside: bool
) -> Reading[None]:
    space: list[str] = []
    yield from text.take_while(SPACE, space.append)
    if (yield from text.accept(tags.open_tag, _drop)):
        is_inside = True
        space.clear()
    if is_inside:
        reasoning = LineBreakTrimmer(out.reasoning)
        reasoning.write("".join(space))
        ends = Markers(tags.close_tag, *tags.other_ends)
        end = yield from text.take_until(ends, reasoning.write)
        reasoning.end(trim=end is not None)
        yield from text.accept(tags.close_tag, _drop)
        yield from text.take_while(_LINE_BREAKS, _drop)
    else:
        out.content("".join(space))
    yield from text.take_while(_ANYTHING, out.content)


def _drop(text: str) -> None:
    """A sink for tags and for the line breaks around them."""

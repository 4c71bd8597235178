"""The parser of reasoning: what stands between two tags is reasoning, what follows is content.

Whether the reasoning has begun is seen in the prompt: chat templates may open it for the model, or
open and close it where thinking is turned off. Line breaks between tags and text are no part of
either. Reasoning without an end, as of an answer that was cut off, is all reasoning.
"""

import re
from typing import NamedTuple

from jaxllm.parsers.deltas import DeltaWriter
from jaxllm.parsers.line_breaks import LineBreakTrimmer
from jaxllm.parsers.stream_parser import StreamParser
from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream


class ReasoningFormat(NamedTuple):
    """The tags of a family of models, and what it does with them."""

    open_tag: str
    close_tag: str
    # Answers begin with reasoning even if neither they nor the prompt have opened it.
    starts_inside: bool
    # Markers that end the reasoning too, of models that forget to close it; they are content.
    other_ends: tuple[str, ...] = ()
    # The tags are special tokens in some models that use them: decode the answer with
    # skip_special_tokens=False.
    needs_special_tokens: bool = True


_LINE_BREAKS = re.compile(r"\n*")
_ANYTHING = re.compile(r"(?s:.*)")


def reasoning_parser(
    reasoning_format: ReasoningFormat, prompt: str = "", enable_thinking: bool = True
) -> StreamParser:
    """A parser that separates one answer's reasoning from its content.

    `prompt` is the rendered prompt, or its end. Without `enable_thinking` the answer is all
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
    """The sink for tags and for the line breaks around them."""

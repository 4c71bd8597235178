"""The reasoning parser: text between two tags is reasoning, and the text after them is content.

The prompt shows whether the reasoning has begun: a chat template may open it, or open and close it
when thinking is turned off. Line breaks between tags and text belong to neither reasoning nor
content. If an answer is cut off before the closing tag, all of it is reasoning.

Some families also write tags around the content, with or without reasoning before them. These tags
are dropped, and text after the closing one is content, too: it may be a tool call.
"""

import enum
import re
from typing import NamedTuple

from jaxllm.parsers.deltas import DeltaWriter
from jaxllm.parsers.line_breaks import LineBreakTrimmer
from jaxllm.parsers.stream_parser import StreamParser
from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream


class ReasoningFormat(NamedTuple):
    """The tags of a model family and how the family uses them."""

    open_tags: tuple[str, ...]  # any of them
    close_tags: tuple[str, ...]
    # Answers begin with reasoning even if neither the answer nor the prompt has an opening tag.
    starts_inside: bool
    # Markers that also end the reasoning, because some models forget to close it. They are content.
    other_ends: tuple[str, ...] = ()
    # The tags around the content, if the family has any.
    content_tags: tuple[str, str] | None = None
    # In some models the tags are special tokens: decode the answer with skip_special_tokens=False.
    needs_special_tokens: bool = True


class Reasoning(NamedTuple):
    """What is known of an answer's reasoning before the answer."""

    format: ReasoningFormat
    # Whether the template's switch is on; None if no template was told.
    enable_thinking: bool | None = None


class Start(enum.Enum):
    """Where an answer begins."""

    REASONING = enum.auto()
    CONTENT = enum.auto()
    TAGGED_CONTENT = enum.auto()  # after the tag that opens the content
    EITHER = enum.auto()  # the answer says it, by an opening tag


def start_of(tags: ReasoningFormat, prompt: str, enable_thinking: bool | None) -> Start:
    """Where the answer to this prompt begins. `prompt` is the rendered prompt, or its end."""
    prompt = prompt.rstrip()
    if tags.content_tags is not None and prompt.endswith(tags.content_tags[0]):
        return Start.TAGGED_CONTENT
    if prompt.endswith(tags.close_tags):
        return Start.CONTENT
    is_open = prompt.endswith(tags.open_tags)
    if enable_thinking is None:
        return Start.REASONING if is_open else Start.EITHER
    return Start.REASONING if enable_thinking and (is_open or tags.starts_inside) else Start.EITHER


_LINE_BREAKS = re.compile(r"\n*")
_ANYTHING = re.compile(r"(?s:.*)")


def reasoning_parser(
    tags: ReasoningFormat, prompt: str = "", enable_thinking: bool = True
) -> StreamParser:
    """Make a parser that separates one answer's reasoning from its content.

    `prompt` is the rendered prompt, or its end. Without `enable_thinking` an answer has reasoning
    only if the model opens it all the same; some models write an empty one.
    """
    text, deltas = TextStream(), DeltaWriter()
    start = start_of(tags, prompt, enable_thinking)
    if start in (Start.CONTENT, Start.TAGGED_CONTENT):
        reading = _read_content(text, deltas, tags, start is Start.TAGGED_CONTENT)
    else:
        reading = _read(text, deltas, tags, start is Start.REASONING)
    return StreamParser(text, deltas, reading)


def _read(
    text: TextStream, out: DeltaWriter, tags: ReasoningFormat, is_inside: bool
) -> Reading[None]:
    space: list[str] = []
    yield from text.take_while(SPACE, space.append)
    if (yield from _accept_any(text, tags.open_tags)):
        is_inside = True
        space.clear()
    if is_inside:
        reasoning = LineBreakTrimmer(out.reasoning)
        reasoning.write("".join(space))
        ends = Markers(*tags.close_tags, *tags.other_ends)
        end = yield from text.take_until(ends, reasoning.write)
        reasoning.end(trim=end is not None)
        yield from _accept_any(text, tags.close_tags)
        yield from text.take_while(_LINE_BREAKS, _drop)
        space.clear()
    yield from _read_content(text, out, tags, False, "".join(space))


def _read_content(
    text: TextStream, out: DeltaWriter, tags: ReasoningFormat, is_open: bool, space: str = ""
) -> Reading[None]:
    """Read the content. `is_open`: its opening tag is in the prompt. `space`: was read before."""
    if tags.content_tags is not None:
        open_tag, close_tag = tags.content_tags
        held = [space]
        yield from text.take_while(SPACE, held.append)
        if is_open or (yield from text.accept(open_tag, _drop)):
            content = LineBreakTrimmer(out.content)
            if is_open:
                content.write("".join(held))
            end = yield from text.take_until(Markers(close_tag), content.write)
            content.end(trim=end is not None)
            yield from text.accept(close_tag, _drop)
            yield from text.take_while(_LINE_BREAKS, _drop)
        else:
            out.content("".join(held))
    else:
        out.content(space)
    yield from text.take_while(_ANYTHING, out.content)


def _accept_any(text: TextStream, tags: tuple[str, ...]) -> Reading[bool]:
    for tag in tags:
        if (yield from text.accept(tag, _drop)):
            return True
    return False


def _drop(text: str) -> None:
    """A sink for tags and for the line breaks around them."""

"""Reasoning between two tags. The text after them is content.

Line breaks between tags and text belong to neither reasoning nor content. If an answer is cut off
before the closing tag, all of it is reasoning.

Some families also write tags around the content, with or without reasoning before them. These tags
are dropped, and text after the closing one is content, too: it may be a tool call.
"""

import re
from typing import NamedTuple

from jaxllm.parsers.deltas import DeltaWriter
from jaxllm.parsers.line_breaks import LineBreakTrimmer
from jaxllm.parsers.reasoning.base import Start
from jaxllm.parsers.text_stream import SPACE, Markers, Reading, TextStream


class TaggedReasoning(NamedTuple):
    """The tags of a model family and how the family uses them."""

    open_tags: tuple[str, ...]  # any of them
    close_tags: tuple[str, ...]
    # Answers begin with reasoning even if neither the answer nor the prompt has an opening tag.
    starts_inside: bool
    # Markers that also end the reasoning, because some models forget to close it. They are content.
    other_ends: tuple[str, ...] = ()
    # The tags around the content, if the family has any.
    content_tags: tuple[str, str] | None = None
    needs_special_tokens: bool = True
    # The reasoning and its tags are content, with the opening tag if only the prompt has it.
    is_content: bool = False

    def start(self, prompt: str, enable_thinking: bool | None) -> Start:
        prompt = prompt.rstrip()
        if self.content_tags is not None and prompt.endswith(self.content_tags[0]):
            return Start.TAGGED_CONTENT
        if prompt.endswith(self.close_tags):
            return Start.CONTENT
        is_open = prompt.endswith(self.open_tags)
        if enable_thinking is None:
            return Start.REASONING if is_open else Start.EITHER
        thinks = enable_thinking and (is_open or self.starts_inside)
        return Start.REASONING if thinks else Start.EITHER

    def read(self, text: TextStream, out: DeltaWriter, start: Start) -> Reading[None]:
        if self.is_content:
            return _read_as_content(text, out, self, start)
        if start in (Start.CONTENT, Start.TAGGED_CONTENT):
            return _read_content(text, out, self, start is Start.TAGGED_CONTENT)
        return _read(text, out, self, start is Start.REASONING)


_LINE_BREAKS = re.compile(r"\n*")
_ANYTHING = re.compile(r"(?s:.*)")


def _read(
    text: TextStream, out: DeltaWriter, tags: TaggedReasoning, is_inside: bool
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
    text: TextStream, out: DeltaWriter, tags: TaggedReasoning, is_open: bool, space: str = ""
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


def _read_as_content(
    text: TextStream, out: DeltaWriter, tags: TaggedReasoning, start: Start
) -> Reading[None]:
    if start is Start.REASONING:
        space: list[str] = []
        yield from text.take_while(SPACE, space.append)
        (tag, *_) = tags.open_tags
        if not (yield from text.starts_with(tag)):
            out.content(tag)
        out.content("".join(space))
    yield from text.take_while(_ANYTHING, out.content)


def _accept_any(text: TextStream, tags: tuple[str, ...]) -> Reading[bool]:
    for tag in tags:
        if (yield from text.accept(tag, _drop)):
            return True
    return False


def _drop(text: str) -> None:
    """A sink for tags and for the line breaks around them."""

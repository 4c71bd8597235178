"""Reasoning before a form: the form begins after the end of the reasoning.

The grammar says so itself, so that nobody has to look for the end while an answer is sampled. The
line breaks that models write after a tag are no part of the form; parsers drop them.
"""

from jaxllm.parsers.reasoning.base import ReasoningFormat, Start
from jaxllm.structured_output.writer import GrammarWriter

_BREAKS = r"/\n{1,2}/?"


def after_reasoning(writer: GrammarWriter, form: str, tags: ReasoningFormat, start: Start) -> str:
    """The expression of an answer whose content has a form."""
    content = _content(writer, form, tags, is_open=start is Start.TAGGED_CONTENT)
    if start in (Start.CONTENT, Start.TAGGED_CONTENT):
        return content
    ends = [writer.until(tag, without=tags.other_ends) for tag in tags.close_tags]
    reasoning = writer.rule(f"({' | '.join(ends)}) {_BREAKS}")
    if start is Start.EITHER:
        opens = " | ".join(map(writer.literal, tags.open_tags))
        reasoning = f"(({opens}) {reasoning})?"
    return f"{reasoning} {content}"


def _content(writer: GrammarWriter, form: str, tags: ReasoningFormat, *, is_open: bool) -> str:
    """The form, with the tags that the family may write around its content."""
    if tags.content_tags is None:
        return f"({form})"
    form = writer.rule(form)
    open_tag, close_tag = map(writer.literal, tags.content_tags)
    if is_open:
        return f"({form} ({_BREAKS} {close_tag})?)"
    return f"({form} | {open_tag} {_BREAKS} {form} {_BREAKS} {close_tag})"

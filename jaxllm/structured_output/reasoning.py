"""Reasoning before a form: the form begins after the end of the reasoning.

The grammar says so itself, so that nobody has to look for the end while an answer is sampled. The
line breaks that models write after a tag are no part of the form; parsers drop them.
"""

from jaxllm.parsers import harmony
from jaxllm.parsers.reasoning.base import ReasoningFormat, Start
from jaxllm.parsers.reasoning.openai_gptoss import HarmonyReasoning
from jaxllm.parsers.reasoning.tagged import TaggedReasoning
from jaxllm.structured_output.writer import GrammarWriter

_BREAKS = r"/\n{1,2}/?"


def after_reasoning(
    writer: GrammarWriter, form: str, reasoning: ReasoningFormat, start: Start
) -> str:
    """The expression of an answer whose content has a form."""
    if isinstance(reasoning, HarmonyReasoning):
        return _in_final_channel(writer, form, start)
    assert isinstance(reasoning, TaggedReasoning), reasoning
    return _after_tags(writer, form, reasoning, start)


def _after_tags(writer: GrammarWriter, form: str, tags: TaggedReasoning, start: Start) -> str:
    content = _content(writer, form, tags, is_open=start is Start.TAGGED_CONTENT)
    if start in (Start.CONTENT, Start.TAGGED_CONTENT):
        return content
    ends = [writer.until(tag, without=tags.other_ends) for tag in tags.close_tags]
    reasoning = writer.rule(f"({' | '.join(ends)}) {_BREAKS}")
    if start is Start.EITHER:
        opens = " | ".join(map(writer.literal, tags.open_tags))
        reasoning = f"(({opens}) {reasoning})?"
    return f"{reasoning} {content}"


def _content(writer: GrammarWriter, form: str, tags: TaggedReasoning, *, is_open: bool) -> str:
    """The form, with the tags that the family may write around its content."""
    if tags.content_tags is None:
        return f"({form})"
    form = writer.rule(form)
    open_tag, close_tag = map(writer.literal, tags.content_tags)
    if is_open:
        return f"({form} ({_BREAKS} {close_tag})?)"
    return f"({form} | {open_tag} {_BREAKS} {form} {_BREAKS} {close_tag})"


def _in_final_channel(writer: GrammarWriter, form: str, start: Start) -> str:
    """Messages of analysis, and then the form as the final message."""
    if start is Start.CONTENT:
        return f"({form})"
    # A message would end at these, too.
    others = [mark for mark in (*harmony.ENDS, harmony.START) if mark != harmony.END]
    rest = f"{writer.until(harmony.END, without=others)} {writer.literal(harmony.NEXT)}"
    analysis = writer.literal(f"{harmony.CHANNEL}{harmony.ANALYSIS}{harmony.MESSAGE}")
    analysis = writer.rule(f"{analysis} {rest}")
    final = writer.literal(f"{harmony.CHANNEL}{harmony.FINAL}")
    kind = writer.literal(f" {harmony.CONSTRAIN}json")
    final = f"{final} ({kind})? {writer.literal(harmony.MESSAGE)}"
    return f"{rest if start is Start.REASONING else ''} {analysis}* {final} ({form})"

"""Between a model's text and a chat message: reasoning and calls of tools, where somebody can find
them. Who that is does not matter here: without parsers all text is content."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.openai.tools import Function


class FunctionCall(msgspec.Struct, kw_only=True):
    """The call of a function; in a stream, a part of it."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool; in a stream the first part has the id, and all have the index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class ChatDelta(msgspec.Struct, kw_only=True):
    """What is new of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """A whole message. `reasoning` is vLLM's."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TextParser(Protocol):
    """Reads one answer, as it comes."""

    @property
    def num_reasoning_tokens(self) -> int | None:
        """How many of the tokens so far are reasoning; None where nobody looks for it."""
        ...

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ChatDelta]:
        """The next piece of text, and the tokens that it is from, of which some may show in a
        later piece only; returns what has become certain."""
        ...

    def finish(self) -> list[ChatDelta]:
        """The answer has ended: returns what was held back."""
        ...


class PlainText:
    """The parser that finds nothing but content."""

    num_reasoning_tokens = None

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ChatDelta]:
        return [ChatDelta(content=text)] if text else []

    def finish(self) -> list[ChatDelta]:
        return []


class Parsers:
    """Makes parsers. This one has none; a server may have one that does."""

    has_tools = False

    def needs_special_tokens(self, with_tools: bool) -> bool:
        """Whether the parsers must see special tokens in the text."""
        return False

    def make(
        self,
        prompt: str,
        functions: Sequence[Function] | None,
        *,
        parallel_calls: bool,
        show_reasoning: bool,
        enable_thinking: bool,
        text_of: Callable[[int], str],
    ) -> TextParser:
        """A parser for one answer; without `functions` calls are not looked for. `text_of` gives
        the text of a token alone."""
        return PlainText()


def message_of(deltas: Iterable[ChatDelta]) -> ChatMessage:
    """What deltas add up to."""
    content, reasoning = [], []
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.content is not UNSET:
            content.append(delta.content)
        if delta.reasoning is not UNSET:
            reasoning.append(delta.reasoning)
        for part in delta.tool_calls or ():
            if part.id is not UNSET:
                calls.append(ToolCall(id=part.id, type="function", function=part.function))
            else:
                calls[-1].function.arguments += part.function.arguments
    text = "".join(content)
    return ChatMessage(
        content=None if calls and not text else text,
        reasoning="".join(reasoning) or UNSET,
        tool_calls=calls or UNSET,
    )

"""The message of a chat answer, whole or in deltas, made from the parsers' results."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.parsers.answer_parser import AnswerParser
from jaxllm.parsers.deltas import (
    ArgumentsDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallDelta,
    add_up,
)


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function call; in a stream, a part of it."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A tool call. In a stream, the first part has the id, and all parts have the index."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class ChatDelta(msgspec.Struct, kw_only=True):
    """The new part of a message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatMessage(msgspec.Struct, kw_only=True):
    """A whole message. The field `reasoning` is vLLM's."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class MessageParser:
    """Makes a message from the text of an answer, whole or streamed."""

    def __init__(
        self, parser: AnswerParser, *, parallel_calls: bool, show_reasoning: bool, echoed: str = ""
    ):
        """`echoed` is a text in front of the answer's own."""
        self._parser = parser
        self._parallel_calls = parallel_calls
        self._show_reasoning = show_reasoning
        self._echoed = echoed

    @property
    def num_reasoning_tokens(self) -> int | None:
        return self._parser.num_reasoning_tokens

    def whole(self, text: str, token_ids: Sequence[int]) -> ChatMessage:
        """Return the message of a whole answer."""
        deltas = self._parse(text, token_ids) + self._parser.finish()
        answer = add_up(filter(self._is_shown, deltas))
        return ChatMessage(
            content=None if answer.tool_calls and not answer.content else answer.content,
            reasoning=answer.reasoning or UNSET,
            tool_calls=[
                ToolCall(
                    id=call.id,
                    type="function",
                    function=FunctionCall(name=call.name, arguments=call.arguments),
                )
                for call in answer.tool_calls
            ]
            or UNSET,
        )

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ChatDelta]:
        """Take the next piece of text and its tokens; return the deltas that are certain now."""
        return self._as_parts(self._parse(text, token_ids))

    def finish(self) -> list[ChatDelta]:
        """End the answer; return the deltas that were held back."""
        return self._as_parts(self._parser.finish())

    def _parse(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        echoed, self._echoed = self._echoed, ""
        deltas = self._parser.feed(text, token_ids)
        return [ContentDelta(echoed), *deltas] if echoed else deltas

    def _as_parts(self, deltas: Iterable[Delta]) -> list[ChatDelta]:
        return [_as_part(delta) for delta in deltas if self._is_shown(delta)]

    def _is_shown(self, delta: Delta) -> bool:
        if isinstance(delta, ReasoningDelta):
            return self._show_reasoning
        if isinstance(delta, ToolCallDelta | ArgumentsDelta):
            return self._parallel_calls or delta.index == 0
        return True


def _as_part(delta: Delta) -> ChatDelta:
    match delta:
        case ReasoningDelta():
            return ChatDelta(reasoning=delta.text)
        case ContentDelta():
            return ChatDelta(content=delta.text)
        case ToolCallDelta():
            function = FunctionCall(name=delta.name)
            call = ToolCall(index=delta.index, id=delta.id, type="function", function=function)
        case ArgumentsDelta():
            call = ToolCall(index=delta.index, function=FunctionCall(arguments=delta.text))
    return ChatDelta(tool_calls=[call])

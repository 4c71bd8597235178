"""The parsers of this package, for the protocol: what they find becomes parts of a message."""

from collections.abc import Callable, Iterable, Sequence

from jaxllm.openai.parsing import ChatDelta, FunctionCall, Parsers, TextParser, ToolCall
from jaxllm.openai.tools import Function
from jaxllm.parsers.answer_parser import AnswerParser
from jaxllm.parsers.deltas import (
    ArgumentsDelta,
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallDelta,
)
from jaxllm.parsers.reasoning.base import reasoning_parser
from jaxllm.parsers.reasoning.counter import ReasoningCounter
from jaxllm.parsers.reasoning.registry import find_reasoning_format
from jaxllm.parsers.tools.base import Tool, tool_parser
from jaxllm.parsers.tools.registry import find_tool_format


class NamedParsers(Parsers):
    """Parsers for the forms of these names; None for what the model does not write."""

    def __init__(self, reasoning: str | None, tools: str | None):
        self._reasoning = None if reasoning is None else find_reasoning_format(reasoning)
        self._tools = None if tools is None else find_tool_format(tools)
        self.has_tools = self._tools is not None

    def needs_special_tokens(self, with_tools: bool) -> bool:
        of_reasoning = self._reasoning is not None and self._reasoning.needs_special_tokens
        of_tools = with_tools and self._tools is not None and self._tools.needs_special_tokens
        return of_reasoning or of_tools

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
        reasoning = tools = counter = None
        if self._reasoning is not None:
            reasoning = reasoning_parser(self._reasoning, prompt, enable_thinking)
            # Another one, which reads token by token.
            reader = reasoning_parser(self._reasoning, prompt, enable_thinking)
            counter = ReasoningCounter(reader, text_of)
        if self._tools is not None and functions is not None:
            offered = [Tool(one.name, one.parameters or {}) for one in functions]
            tools = tool_parser(self._tools, offered)
        parser = AnswerParser(reasoning, tools)
        return _ChatParser(parser, counter, parallel_calls, show_reasoning)


class _ChatParser:
    """An AnswerParser in the protocol's words."""

    def __init__(
        self,
        parser: AnswerParser,
        counter: ReasoningCounter | None,
        parallel_calls: bool,
        show_reasoning: bool,
    ):
        self._parser = parser
        self._counter = counter
        self._parallel_calls = parallel_calls
        self._show_reasoning = show_reasoning

    @property
    def num_reasoning_tokens(self) -> int | None:
        return None if self._counter is None else self._counter.num_tokens

    def feed(self, text: str, token_ids: Sequence[int]) -> list[ChatDelta]:
        if self._counter is not None:
            self._counter.feed(token_ids)
        return self._translated(self._parser.feed(text))

    def finish(self) -> list[ChatDelta]:
        if self._counter is not None:
            self._counter.finish()
        return self._translated(self._parser.finish())

    def _translated(self, deltas: Iterable[Delta]) -> list[ChatDelta]:
        return [_translated(delta) for delta in deltas if self._is_shown(delta)]

    def _is_shown(self, delta: Delta) -> bool:
        if isinstance(delta, ReasoningDelta):
            return self._show_reasoning
        if isinstance(delta, ToolCallDelta | ArgumentsDelta):
            return self._parallel_calls or delta.index == 0
        return True


def _translated(delta: Delta) -> ChatDelta:
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

"""How a model writes its answers: the formats of its reasoning and of its tool calls."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from jaxllm.parsers.answer_parser import AnswerParser
from jaxllm.parsers.reasoning.base import ReasoningFormat, reasoning_parser
from jaxllm.parsers.reasoning.counter import ReasoningCounter
from jaxllm.parsers.reasoning.registry import find_reasoning_format
from jaxllm.parsers.tools.base import Tool, ToolFormat, tool_parser
from jaxllm.parsers.tools.registry import find_tool_format


class AnswerFormat(NamedTuple):
    """The two formats. None: that part of an answer is not parsed."""

    reasoning: ReasoningFormat | None = None
    tools: ToolFormat | None = None

    @classmethod
    def of(cls, reasoning_parser: str | None = None, tool_call_parser: str | None = None) -> Self:
        """Find the formats of these names; raise ValidationError for an unknown one."""
        return cls(
            None if reasoning_parser is None else find_reasoning_format(reasoning_parser),
            None if tool_call_parser is None else find_tool_format(tool_call_parser),
        )

    def needs_special_tokens(self, with_tools: bool = True) -> bool:
        """Whether answers must be decoded with skip_special_tokens=False."""
        used = (self.reasoning, self.tools if with_tools else None)
        return any(one is not None and one.needs_special_tokens for one in used)

    def parser(
        self,
        prompt: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        enable_thinking: bool = True,
        text_of: Callable[[int], str] | None = None,
    ) -> AnswerParser:
        """Make a parser for one answer to this prompt.

        Args:
          prompt: the rendered prompt, which may have begun the reasoning.
          tools: the request's tools, in OpenAI's form; without them tool calls are not parsed.
          enable_thinking: False if the template turned thinking off; the answer has no reasoning,
            unless the model opens it all the same.
          text_of: returns the text of a single token; with it, reasoning tokens are counted.
        """
        reasoning = calls = counter = None
        if self.reasoning is not None:
            reasoning = reasoning_parser(self.reasoning, prompt or "", enable_thinking)
            if text_of is not None:
                # A second parser, because the counter reads token by token.
                reader = reasoning_parser(self.reasoning, prompt or "", enable_thinking)
                counter = ReasoningCounter(reader, text_of)
        if self.tools is not None and tools is not None:
            calls = tool_parser(self.tools, list(map(Tool.of, tools)))
        return AnswerParser(reasoning, calls, counter)

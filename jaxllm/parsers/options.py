"""The options that select parsers. Command line flags are generated from the fields."""

from dataclasses import dataclass

from jaxllm.config import option
from jaxllm.errors import ValidationError
from jaxllm.parsers.answer_format import AnswerFormat
from jaxllm.parsers.reasoning.registry import REASONING_FORMATS
from jaxllm.parsers.tools.registry import TOOL_FORMATS


@dataclass(frozen=True, kw_only=True)
class ParserOptions:
    """Parsers"""

    enable_auto_tool_choice: bool = option(
        False, "Let the model call tools that a request offers; needs --tool-call-parser."
    )
    tool_call_parser: str | None = option(
        None, f"Form in which the model writes calls of tools: {', '.join(TOOL_FORMATS)}."
    )
    reasoning_parser: str | None = option(
        None, f"Form in which the model writes its reasoning: {', '.join(REASONING_FORMATS)}."
    )

    @property
    def answer_format(self) -> AnswerFormat:
        return AnswerFormat.of(self.reasoning_parser, self.tool_call_parser)

    def validate(self) -> None:
        """Refuse invalid options before a model is loaded."""
        if self.enable_auto_tool_choice != (self.tool_call_parser is not None):
            raise ValidationError(
                "enable_auto_tool_choice and tool_call_parser need each other; give both or none"
            )
        _ = self.answer_format  # raises if there is no such parser

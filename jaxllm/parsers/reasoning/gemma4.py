"""Gemma 4: reasoning is a channel of its own.

    <|channel>thought
    The user wants ...
    <channel|>The answer.

If thinking is turned off, the template may write an empty channel into the prompt.
"""

from jaxllm.parsers.reasoning.base import ReasoningFormat

GEMMA4 = ReasoningFormat(("<|channel>thought",), ("<channel|>",), starts_inside=False)

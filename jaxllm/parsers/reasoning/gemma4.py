"""Gemma 4: reasoning is a channel of its own.

    <|channel>thought
    The user wants ...
    <channel|>The answer.

If thinking is turned off, the template may write an empty channel into the prompt.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

GEMMA4 = TaggedReasoning(("<|channel>thought",), ("<channel|>",), starts_inside=False)

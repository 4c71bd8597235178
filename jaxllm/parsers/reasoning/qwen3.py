"""Qwen 3 and later: reasoning in tags that the model opens itself, or the chat template does.

    <think>
    The user wants ...
    </think>

    The answer.

With thinking turned off the template opens and closes the tags in the prompt. Models of version 3.5
sometimes call a tool without closing the tag first.
"""

from jaxllm.parsers.reasoning.base import ReasoningFormat

QWEN3 = ReasoningFormat("<think>", "</think>", starts_inside=False, other_ends=("<tool_call>",))

"""Qwen 3 and later: reasoning in tags. The model or the chat template writes the opening tag.

    <think>
    The user wants ...
    </think>

    The answer.

If thinking is turned off, the template writes both tags into the prompt. Models of version 3.5
sometimes call a tool without closing the reasoning first.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

QWEN3 = TaggedReasoning(
    ("<think>",), ("</think>",), starts_inside=False, other_ends=("<tool_call>",)
)

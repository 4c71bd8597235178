"""Kimi K2 Thinking: the answer begins with reasoning, which a call may end without its tag.

<think>The user wants ...</think>The answer.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

KIMI_K2 = TaggedReasoning(
    ("<think>",),
    ("</think>",),
    starts_inside=True,
    other_ends=("<|tool_calls_section_begin|>",),
)

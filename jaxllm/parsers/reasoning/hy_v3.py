"""Hy3: reasoning in tags, which in some releases end in a word of the release.

<think>The user wants ...</think>The answer.

If thinking is turned off, the reasoning is empty, in the answer or in the prompt.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

HY_V3 = TaggedReasoning(
    ("<think>", "<think:opensource>"), ("</think>", "</think:opensource>"), starts_inside=False
)

"""Hunyuan: tags around the reasoning, and around the content after it.

    <think>
    The user wants ...
    </think>
    <answer>
    The answer.
    </answer>

If thinking is turned off, the reasoning is empty, in the answer or in the prompt.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

HUNYUAN_A13B = TaggedReasoning(
    ("<think>",), ("</think>",), starts_inside=False, content_tags=("<answer>", "</answer>")
)

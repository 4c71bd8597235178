"""Hunyuan: tags around the reasoning, and around the content after it.

    <think>
    The user wants ...
    </think>
    <answer>
    The answer.
    </answer>

If thinking is turned off, the reasoning is empty, in the answer or in the prompt.
"""

from jaxllm.parsers.reasoning.base import ReasoningFormat

HUNYUAN_A13B = ReasoningFormat(
    ("<think>",), ("</think>",), starts_inside=False, content_tags=("<answer>", "</answer>")
)

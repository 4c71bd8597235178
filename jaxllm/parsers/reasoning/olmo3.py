"""OLMo 3 Think: the answer begins inside the reasoning. The tags are plain text.

    The user wants ...
    </think>

    The answer.

The opening tag is in the prompt.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

OLMO3 = TaggedReasoning(("<think>",), ("</think>",), starts_inside=True, needs_special_tokens=False)

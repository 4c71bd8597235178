"""OLMo 3 Think: the answer begins inside the reasoning. The tags are plain text.

    The user wants ...
    </think>

    The answer.

The opening tag is in the prompt.
"""

from jaxllm.parsers.reasoning.base import ReasoningFormat

OLMO3 = ReasoningFormat(("<think>",), ("</think>",), starts_inside=True, needs_special_tokens=False)

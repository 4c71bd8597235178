"""DeepSeek R1, QwQ and others that always think: the answer begins inside the reasoning.

    The user wants ...
    </think>

    The answer.

The opening tag stands in the prompt; where it does not, the model may or may not write it.
"""

from jaxllm.parsers.reasoning.base import ReasoningFormat

DEEPSEEK_R1 = ReasoningFormat("<think>", "</think>", starts_inside=True)

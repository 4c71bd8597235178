"""DeepSeek R1, QwQ and other models that always think: the answer begins inside the reasoning.

    The user wants ...
    </think>

    The answer.

The opening tag is usually in the prompt. Otherwise the model may or may not write it.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

DEEPSEEK_R1 = TaggedReasoning(("<think>",), ("</think>",), starts_inside=True)

"""DeepSeek V3.1 and V3.2: the template opens the reasoning if its variable `thinking` is on, and
closes it otherwise, so an answer has no opening tag.

    The user wants ...</think>The answer.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

DEEPSEEK_V3 = TaggedReasoning(("<think>",), ("</think>",), starts_inside=False)

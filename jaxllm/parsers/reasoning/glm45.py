"""GLM 4.5 and later: reasoning in tags. The model or, from 4.7 on, the template writes the first.

    <think>The user wants ...</think>
    The answer.

If thinking is turned off, the template closes the reasoning in the prompt.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

GLM45 = TaggedReasoning(("<think>",), ("</think>",), starts_inside=False)

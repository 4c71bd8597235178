"""Seed OSS: the answer begins with reasoning, in tags of its own.

    <seed:think>The user wants ...
    <seed:cot_budget_reflect>I have used 129 tokens.</seed:cot_budget_reflect>
    </seed:think>The answer.

The model's remarks on its budget are reasoning. With a budget of 0 the template closes the
reasoning in the prompt.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

SEED_OSS = TaggedReasoning(("<seed:think>",), ("</seed:think>",), starts_inside=True)

"""ERNIE 4.5: the answer begins inside the reasoning, and its content may have tags of its own.

    The user wants ...
    </think>

    <response>
    The answer.
    </response>

The opening tag of the reasoning is in the prompt.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

ERNIE45 = TaggedReasoning(
    ("<think>",), ("</think>",), starts_inside=True, content_tags=("<response>", "</response>")
)

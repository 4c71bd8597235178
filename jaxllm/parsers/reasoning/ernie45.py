"""ERNIE 4.5: the answer begins inside the reasoning, and its content may have tags of its own.

    The user wants ...
    </think>

    <response>
    The answer.
    </response>

The opening tag of the reasoning is in the prompt.
"""

from jaxllm.parsers.reasoning.base import ReasoningFormat

ERNIE45 = ReasoningFormat(
    ("<think>",), ("</think>",), starts_inside=True, content_tags=("<response>", "</response>")
)

"""Granite 3.2 and 3.3: plain sentences announce the reasoning and the content.

Here is my thought process:
The user wants ...

Here is my response:
The answer.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

GRANITE = TaggedReasoning(
    ("Here is my thought process:", "Here's my thought process:"),
    ("Here is my response:", "Here's my response:"),
    starts_inside=False,
    needs_special_tokens=False,
)

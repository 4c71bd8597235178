"""Command R7B and Command A: tags around the reasoning, and around the content after it.

    <|START_THINKING|>The user wants ...<|END_THINKING|>
    <|START_RESPONSE|>The answer.<|END_RESPONSE|>

Tool calls follow the reasoning without the tags of the content. Without reasoning, the template may
write the opening tag of the content or an empty reasoning.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

COHERE_COMMAND3 = TaggedReasoning(
    ("<|START_THINKING|>",),
    ("<|END_THINKING|>",),
    starts_inside=False,
    other_ends=("<|START_ACTION|>", "<|START_RESPONSE|>"),
    content_tags=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
)

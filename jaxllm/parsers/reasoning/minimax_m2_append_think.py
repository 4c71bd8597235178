"""MiniMax M2 with its reasoning left in the content, tags and all, so that clients send it back.

The model was trained to see what it thought before, and the template has written the opening tag,
which is put in front of the content.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

MINIMAX_M2_APPEND_THINK = TaggedReasoning(
    ("<think>",), ("</think>",), starts_inside=True, is_content=True
)

"""Magistral and Ministral: reasoning in tags, which are special tokens.

[THINK]The user wants ...[/THINK]The answer.
"""

from jaxllm.parsers.reasoning.tagged import TaggedReasoning

MISTRAL = TaggedReasoning(("[THINK]",), ("[/THINK]",), starts_inside=False)

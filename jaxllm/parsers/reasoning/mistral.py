"""Magistral and Ministral: reasoning in tags, which are special tokens.

[THINK]The user wants ...[/THINK]The answer.
"""

from jaxllm.parsers.reasoning.base import ReasoningFormat

MISTRAL = ReasoningFormat(("[THINK]",), ("[/THINK]",), starts_inside=False)

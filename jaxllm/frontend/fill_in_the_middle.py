"""Prompts for the text between two texts, for models that were trained to write it.

Such a model has tokens that mark the text before the gap, the text behind it, and the gap. Families
have different tokens, and some put the text behind the gap first.
"""

from typing import NamedTuple

from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.frontend.tokenizer import Tokenizer


class Marks(NamedTuple):
    """The tokens of a family."""

    before: str
    behind: str
    gap: str | None  # None: the gap follows the text before it
    has_behind_first: bool = False


_FAMILIES = (
    Marks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    Marks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite 3, StableCode
    Marks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    Marks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4.5
    Marks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    # Seed-Coder and Codestral.
    Marks("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", has_behind_first=True),
    Marks("[PREFIX]", "[SUFFIX]", None, has_behind_first=True),
)


def find_marks(tokenizer: Tokenizer) -> Marks | None:
    """The marks that a tokenizer has, if it has any."""
    hf = tokenizer.hf

    def has(token: str | None) -> bool:
        number = None if token is None else hf.convert_tokens_to_ids(token)
        return token is None or (
            isinstance(number, int) and hf.convert_ids_to_tokens(number) == token
        )

    return next((marks for marks in _FAMILIES if all(map(has, marks[:3]))), None)


def fill_in(
    tokenizer: Tokenizer,
    marks: Marks,
    before: str,
    behind: str,
    length: PromptLength,
    *,
    add_special_tokens: bool,
) -> list[int]:
    """The ids of a prompt for the text between `before` and `behind`."""

    def marked(mark: str, text: str) -> list[int]:
        token = tokenizer.hf.convert_tokens_to_ids(mark)
        assert isinstance(token, int), mark
        return [token, *length.encode(tokenizer, text, add_special_tokens=False)]

    parts = [marked(marks.before, before), marked(marks.behind, behind)]
    if marks.has_behind_first:
        parts.reverse()
    if marks.gap is not None:
        parts.append(marked(marks.gap, ""))
    begin = tokenizer.encode("") if add_special_tokens else []
    return length.fit([*begin, *(token for part in parts for token in part)])

"""What calls with several prompts have in common: one value for all, or one for each."""

import numbers
from collections.abc import Sequence
from typing import Any, cast

from jaxllm.errors import ValidationError
from jaxllm.prompts import PromptType, TokensPrompt


def as_prompts(prompts: PromptType | Sequence[PromptType]) -> Sequence[PromptType]:
    """Return a list of prompts. A string, a dict and a list of ids are one prompt each."""
    if isinstance(prompts, str | dict):
        return [cast(PromptType, prompts)]
    if not isinstance(prompts, Sequence):
        raise ValidationError(
            f"prompts has type {type(prompts).__name__}; give a string, a list of token ids, "
            "a dict or a list of these",
            parameter="prompts",
        )
    if prompts and isinstance(prompts[0], numbers.Integral):  # numpy's, too
        return [cast(TokensPrompt, {"prompt_token_ids": prompts})]
    return cast(Sequence[PromptType], prompts)


def for_each(name: str, value: Any, count: int) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise ValidationError(
            f"{name} has {len(value)} entries for {count} prompts; give one, or one per prompt",
            parameter=name,
        )
    return value


# The parameters that errors about one prompt of a batch name.
OF_A_PROMPT = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt")


def located(error: ValidationError, name: str, index: int, count: int) -> ValidationError:
    """The error with the index of its prompt in the batch."""
    return ValidationError(
        f"{name}[{index}]: {error}" if count > 1 else str(error),
        parameter=error.parameter,
        value=error.value,
        prompt_index=index,
    )

"""What a user may pass as a prompt."""

from collections.abc import Mapping
from typing import NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `prompt` is only copied to the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt


def size_of(prompt: object) -> int:
    """The rough size of a prompt of any kind, in characters or tokens."""
    given = prompt
    if isinstance(prompt, Mapping):
        given = prompt.get("prompt_token_ids") or prompt.get("prompt")
    return len(given) if isinstance(given, str | list | tuple) else 0

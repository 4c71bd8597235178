"""What a user may pass as a prompt."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict


class TextPrompt(TypedDict):
    """A prompt as text, and the images for which it has tokens (jaxllm/media/README.md)."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """A prompt as token ids. `prompt` is only copied to the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multi_modal_uuids: NotRequired[Mapping[str, Any]]
    mm_processor_kwargs: NotRequired[Mapping[str, Any]]


PromptType = str | list[int] | TextPrompt | TokensPrompt


def size_of(prompt: object) -> int:
    """The rough size of a prompt of any kind, in characters or tokens."""
    given = prompt
    if isinstance(prompt, Mapping):
        given = prompt.get("prompt_token_ids") or prompt.get("prompt")
    return len(given) if isinstance(given, str | list | tuple) else 0

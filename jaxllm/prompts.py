"""What a user may pass as a prompt."""

import math
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


class EmbedsPrompt(TypedDict):
    """A prompt as embeddings (jaxllm/prompt_embeds/README.md)."""

    prompt_embeds: Any  # an array [tokens, hidden size], or a file of one in base64
    cache_salt: NotRequired[str]


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt


def size_of(prompt: object) -> int:
    """The rough size of a prompt of any kind, in characters, tokens or numbers."""
    given = prompt
    if isinstance(prompt, Mapping):
        given = prompt.get("prompt_embeds")
        if given is not None and not isinstance(given, str):
            return math.prod(getattr(given, "shape", ()))
        given = given or prompt.get("prompt_token_ids") or prompt.get("prompt")
    return len(given) if isinstance(given, str | list | tuple) else 0

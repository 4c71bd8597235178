"""`truncation: "auto"`: a conversation that is too long begins with a later turn.

A turn begins with a message of the user, so that no call is without its output. What the system
says stays.
"""

import bisect

import msgspec

from jaxllm.errors import ValidationError
from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.served_model import ServedModel
from jaxllm.prompts import PromptType


def prompts_that_fit(
    chat: ChatRequest, served: ServedModel, max_output_tokens: int | None
) -> list[PromptType]:
    """The prompt of as many of the last turns as the context holds; raise ValidationError if that
    is not even one. There is room for the answer behind it, up to half of the context."""
    room = min(max_output_tokens or 1, served.max_model_len // 2)
    length = PromptLength(served.max_model_len - room + 1)
    messages = chat.messages
    turns = [place for place, one in enumerate(messages) if one.get("role") == "user"]
    system = [one for one in messages[: turns[0] if turns else 0] if one.get("role") == "system"]
    beginnings = [0, *turns[1:]]  # at first with everything

    def of(begin: int) -> ChatRequest:
        kept = [*system, *messages[begin:]] if begin else messages
        return msgspec.structs.replace(chat, messages=kept)

    def fits(begin: int) -> bool:
        return not _is_too_long(of(begin), served, length)

    if fits(0):
        return chat.prompts(served)
    # Later beginnings make shorter prompts, so the first that fits is found by halving. If none
    # does, the last one says what is wrong.
    first = bisect.bisect_left(beginnings, True, key=fits)
    return of(beginnings[min(first, len(beginnings) - 1)]).prompts(served)


def _is_too_long(chat: ChatRequest, served: ServedModel, length: PromptLength) -> bool:
    try:
        chat.prompt(served, length)
    except ValidationError as error:
        if error.parameter != "prompt":
            raise
        return True
    return False

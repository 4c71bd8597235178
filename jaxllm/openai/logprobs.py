"""Logprobs in the protocol's two shapes: a list of tokens (chat), parallel lists (completions)."""

from collections.abc import Callable, Sequence

import msgspec

from jaxllm.outputs import Logprob

Position = dict[int, Logprob]  # the sampled or prompt token first, then the most likely tokens

TextOf = Callable[[int], str]  # the text of a token

# Replaces minus infinity, which JSON cannot express.
_LOWEST = -9999.0


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob, kw_only=True):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatTokenLogprob]


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def chat_logprobs(
    positions: Sequence[Position],
    top: int,
    text_of: TextOf,
    bytes_of: Callable[[int], bytes],
) -> ChatLogprobs:
    """Each token with the `top` most likely tokens at its position; -1 means all available."""
    content = []
    for position in positions:
        token_id, entry = next(iter(position.items()))
        ranked = sorted(position.items(), key=lambda item: item[1].rank or 0)
        chosen = _token_logprob(token_id, entry, text_of, bytes_of)
        content.append(
            ChatTokenLogprob(
                token=chosen.token,
                logprob=chosen.logprob,
                bytes=chosen.bytes,
                top_logprobs=[
                    _token_logprob(other, one, text_of, bytes_of)
                    for other, one in (ranked if top == -1 else ranked[:top])
                ],
            )
        )
    return ChatLogprobs(content)


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[Position | None],
    text_of: TextOf,
    offset: int = 0,
) -> CompletionLogprobs:
    """Parallel lists over tokens. Only the first position of a prompt has no logprobs.

    Args:
      offset: of the first token in the text.
    """
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, position in zip(token_ids, positions, strict=True):
        token = text_of(token_id)
        result.text_offset.append(offset)
        result.tokens.append(token)
        offset += len(token)
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
        else:
            result.token_logprobs.append(max(position[token_id].logprob, _LOWEST))
            result.top_logprobs.append(
                {text_of(other): max(one.logprob, _LOWEST) for other, one in position.items()}
            )
    return result


def _token_logprob(
    token_id: int, entry: Logprob, text_of: TextOf, bytes_of: Callable[[int], bytes]
) -> TokenLogprob:
    return TokenLogprob(
        token=text_of(token_id),
        logprob=max(entry.logprob, _LOWEST),
        # Several tokens may make one character: their bytes can be joined, but not their texts.
        bytes=list(bytes_of(token_id)),
    )

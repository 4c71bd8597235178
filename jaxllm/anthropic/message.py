"""The message of an answer: blocks of thinking, text and calls, as they come."""

import json
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from jaxllm.anthropic.request import MessagesRequest
from jaxllm.openai.answer import TIMEOUT
from jaxllm.openai.blocks import Begin, End, More, Piece
from jaxllm.openai.errors import AnswerError
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import CompletionOutput, RequestOutput

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """What the model thought. Nothing here signs it, and nobody checks it."""

    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call. One that was cut off has no input."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, kw_only=True):
    """Tokens. Those of the prompt that were in the cache are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct, kw_only=True):
    """The body of an answer; at the begin of a stream, one without content."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


def begun(piece: Begin) -> Block:
    """A block without its text."""
    if piece.kind == "call":
        return ToolUseBlock(id=piece.id, name=piece.name, input={})
    return TextBlock(text="") if piece.kind == "text" else ThinkingBlock(thinking="")


def add_up(pieces: Iterable[Piece], *, hides_thinking: bool) -> list[Block]:
    """Join pieces to whole blocks."""
    blocks: list[Block] = []
    texts: list[str] = []
    for piece in pieces:
        match piece:
            case Begin():
                blocks.append(begun(piece))
            case More(text):
                texts.append(text)
            case End():
                _fill(blocks[-1], "".join(texts), hides_thinking)
                texts.clear()
    return blocks


def _fill(block: Block, text: str, hides_thinking: bool) -> None:
    match block:
        case TextBlock():
            block.text = text
        case ThinkingBlock():
            block.thinking = "" if hides_thinking else text
        case ToolUseBlock():
            try:
                given = json.loads(text or "{}")
            except (ValueError, RecursionError):
                given = {}
            block.input = given if isinstance(given, dict) else {}


def usage_of(output: RequestOutput, num_generated: int) -> MessageUsage:
    cached = output.num_cached_tokens or 0
    return MessageUsage(
        input_tokens=len(output.prompt_token_ids) - cached,
        cache_read_input_tokens=cached,
        output_tokens=num_generated,
    )


def why_it_stopped(
    request: MessagesRequest,
    served: ServedModel,
    one: CompletionOutput,
    *,
    num_tokens: int,
    has_calls: bool,
) -> StopReason:
    """The stop reason of an answer with so many tokens in prompt and answer; raise if its time was
    over."""
    if one.stop_reason == TIMEOUT:
        raise AnswerError("the answer took longer than --request-timeout allows")
    if one.finish_reason == "length":
        is_full = num_tokens >= served.max_model_len
        return "model_context_window_exceeded" if is_full else "max_tokens"
    if isinstance(one.stop_reason, str) and one.stop_reason in (request.body.stop_sequences or ()):
        return "stop_sequence"
    return "tool_use" if has_calls else "end_turn"


def hides_thinking(request: MessagesRequest) -> bool:
    thinking = request.body.thinking
    return thinking is not None and thinking.display == "omitted"

"""A whole chat answer: one message for each choice."""

from collections.abc import Sequence
from typing import Any

import msgspec

from jaxllm.openai.answer import Usage, check_finished, usage_of
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.logprobs import ChatLogprobs, Position
from jaxllm.openai.message import ChatMessage, MessageParser
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import CompletionOutput, RequestOutput


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The body of a chat answer. The last three fields are vLLM's."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: list[Position | None] | None
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, Any] | None


def answer_chat(
    request: ChatRequest,
    answer_id: str,
    created: int,
    outputs: Sequence[RequestOutput],
    served: ServedModel,
) -> ChatCompletion:
    """Make the body of the answer; raise if the engine failed."""
    check_finished(outputs)
    (output,) = outputs
    parsers = [request.parser(output.prompt, served) for _ in output.outputs]
    return ChatCompletion(
        id=request.id_of(answer_id),
        created=created,
        model=served.names[0],
        system_fingerprint=served.fingerprint,
        choices=[
            _choice(request, served, one, parser)
            for one, parser in zip(output.outputs, parsers, strict=True)
        ],
        usage=usage_of(outputs, nums_reasoning=[one.num_reasoning_tokens for one in parsers]),
        prompt_logprobs=output.prompt_logprobs,
        prompt_token_ids=output.prompt_token_ids if request.return_token_ids else None,
        kv_transfer_params=output.kv_transfer_params,
    )


def finish_reason(request: ChatRequest, one: CompletionOutput, has_calls: bool) -> str | None:
    """The finish reason: an answer that ends with tool calls waits for their results. As OpenAI has
    it, a call that the request names just stops."""
    is_choice = has_calls and one.finish_reason == "stop" and not request.names_its_call
    return "tool_calls" if is_choice else one.finish_reason


def _choice(
    request: ChatRequest, served: ServedModel, one: CompletionOutput, parser: MessageParser
) -> ChatChoice:
    message = parser.whole(one.text, one.token_ids)
    return ChatChoice(
        index=one.index,
        message=message,
        logprobs=request.logprobs_of(one, served),
        finish_reason=finish_reason(request, one, bool(message.tool_calls)),
        stop_reason=one.stop_reason,
        token_ids=one.token_ids if request.return_token_ids else None,
    )

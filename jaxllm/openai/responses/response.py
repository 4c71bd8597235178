"""The body of a response and its items."""

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from jaxllm.openai.blocks import Begin
from jaxllm.openai.errors import ErrorBody
from jaxllm.openai.logprobs import ChatTokenLogprob
from jaxllm.openai.responses.request import (
    ReasoningConfig,
    ResponsesRequest,
    TextConfig,
    TextFormat,
)
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import RequestOutput

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ChatTokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought, as it is."""

    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    status: ItemStatus


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET  # of a function that is in one
    arguments: str
    status: ItemStatus


Item = MessageItem | ReasoningItem | FunctionCallItem


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """The body of an answer; while it is streamed, what there is of it."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    # These three as the request has them.
    reasoning: Any
    text: Any
    tools: list[Any]
    store: bool
    temperature: float
    tool_choice: Any
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    background: bool
    metadata: dict[str, str]
    service_tier: str = "default"
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    usage: ResponseUsage | None = None


def begun(request: ResponsesRequest, created: int, served: ServedModel) -> Response:
    """The response before there is anything of it."""
    body, params = request.body, request.sampling_params(served)
    return Response(
        id=request.id,
        created_at=created,
        status="in_progress",
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        model=served.names[0],
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=body.reasoning or ReasoningConfig(),
        store=bool(body.store),
        truncation=body.truncation or "disabled",
        background=bool(body.background),
        temperature=params.temperature,
        text=body.text or TextConfig(format=TextFormat(type="text")),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        metadata=body.metadata or {},
        user=body.user,
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
    )


def failed(response: Response, error: ErrorBody) -> Response:
    """The response when there will be no more of it."""
    why = ResponseError(code="server_error", message=error.error.message)
    return msgspec.structs.replace(response, status="failed", error=why)


def new_item(piece: Begin, item_id: str, namespaces: Mapping[str, tuple[str, str]]) -> Item:
    """An item without its text.

    Args:
      namespaces: the namespaces and names of functions, by what the model calls them.
    """
    if piece.kind == "call":
        namespace, name = namespaces.get(piece.name, (msgspec.UNSET, piece.name))
        return FunctionCallItem(
            id=f"fc_{item_id}",
            call_id=piece.id,
            name=name,
            namespace=namespace,
            arguments="",
            status="in_progress",
        )
    if piece.kind == "text":
        return MessageItem(id=f"msg_{item_id}", status="in_progress", content=[])
    return ReasoningItem(id=f"rs_{item_id}", status="in_progress", content=[])


def filled(item: Item, text: str, logprobs: list[ChatTokenLogprob], status: ItemStatus) -> Item:
    """The item with its text."""
    match item:
        case FunctionCallItem():
            return msgspec.structs.replace(item, arguments=text, status=status)
        case MessageItem():
            part = OutputText(text=text, logprobs=logprobs)
            return msgspec.structs.replace(item, content=[part], status=status)
        case ReasoningItem():
            part = ReasoningText(text=text)
            return msgspec.structs.replace(item, content=[part], status=status)


def ended(
    response: Response,
    output: RequestOutput,
    items: list[Item],
    *,
    num_generated: int,
    num_reasoning: int | None,
    is_cut: bool,
) -> Response:
    """The whole response."""
    prompt = len(output.prompt_token_ids)
    usage = ResponseUsage(
        input_tokens=prompt,
        input_tokens_details=InputTokensDetails(cached_tokens=output.num_cached_tokens or 0),
        output_tokens=num_generated,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=num_reasoning or 0),
        total_tokens=prompt + num_generated,
    )
    return msgspec.structs.replace(
        response,
        status="incomplete" if is_cut else "completed",
        completed_at=None if is_cut else int(time.time()),
        incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
        output=items,
        usage=usage,
    )

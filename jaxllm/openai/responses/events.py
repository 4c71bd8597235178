"""The events of a streamed response. Each has the number of its place in the stream."""

import msgspec

from jaxllm.openai.logprobs import ChatTokenLogprob
from jaxllm.openai.responses.response import Item, OutputText, ReasoningText, Response


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int


class Created(Event, kw_only=True, tag="response.created"):
    response: Response


class InProgress(Event, kw_only=True, tag="response.in_progress"):
    response: Response


class ItemAdded(Event, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(Event, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: Item


class PartAdded(Event, kw_only=True, tag="response.content_part.added"):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class PartDone(Event, kw_only=True, tag="response.content_part.done"):
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText


class OutputTextDelta(Event, kw_only=True, tag="response.output_text.delta"):
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(Event, kw_only=True, tag="response.output_text.done"):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDelta(Event, kw_only=True, tag="response.reasoning_text.delta"):
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDone(Event, kw_only=True, tag="response.reasoning_text.done"):
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class ArgumentsDelta(Event, kw_only=True, tag="response.function_call_arguments.delta"):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, kw_only=True, tag="response.function_call_arguments.done"):
    item_id: str
    output_index: int
    name: str
    arguments: str


class Completed(Event, kw_only=True, tag="response.completed"):
    response: Response


class Incomplete(Event, kw_only=True, tag="response.incomplete"):
    response: Response


class Failed(Event, kw_only=True, tag="response.failed"):
    response: Response


ResponseEvent = (
    Created
    | InProgress
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | Completed
    | Incomplete
    | Failed
)

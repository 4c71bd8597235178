"""A message in events: its head, then each block from begin to end, then why it stopped."""

from collections.abc import Iterable, Sequence

import msgspec

from jaxllm.anthropic.errors import MessagesError, in_its_shape
from jaxllm.anthropic.message import (
    Block,
    Message,
    MessageUsage,
    StopReason,
    begun,
    hides_thinking,
    usage_of,
    why_it_stopped,
)
from jaxllm.anthropic.request import MessagesRequest
from jaxllm.openai.answer import check_finished
from jaxllm.openai.blocks import Begin, Blocks, End, Kind, More, Piece
from jaxllm.openai.errors import ErrorBody
from jaxllm.openai.message import MessageParser
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import CompletionOutput, RequestOutput


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    """An event of a stream."""


class MessageStart(Event, kw_only=True, tag="message_start"):
    message: Message


class ContentBlockStart(Event, kw_only=True, tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputJSONDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | InputJSONDelta


class ContentBlockDelta(Event, kw_only=True, tag="content_block_delta"):
    index: int
    delta: BlockDelta


class ContentBlockStop(Event, kw_only=True, tag="content_block_stop"):
    index: int


class Stop(msgspec.Struct, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Event, kw_only=True, tag="message_delta"):
    """Why the message stopped, and the tokens in the end."""

    delta: Stop
    usage: MessageUsage


class MessageStop(Event, kw_only=True, tag="message_stop"):
    """The last event."""


MessageEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)


class MessageStream:
    """Makes the events of one answer."""

    def __init__(self, request: MessagesRequest, answer_id: str, created: int, served: ServedModel):
        self._request = request
        self._answer_id = answer_id
        self._served = served
        self._parser: MessageParser | None = None  # from the first output on
        self._blocks = Blocks()
        self._num_generated = 0
        self._index = -1  # of the newest block
        self._kind: Kind = "text"  # of that block

    def take(self, place: int, output: RequestOutput) -> Sequence[MessageEvent]:
        """Make the events of an output; raise if the engine failed."""
        check_finished([output])
        events: list[MessageEvent] = []
        if self._parser is None:
            self._parser = self._request.chat.parser(output.prompt, self._served)
            events.append(MessageStart(message=self._head(output)))
        for one in output.outputs:
            self._num_generated += len(one.token_ids)
            deltas = self._parser.feed(one.text, one.token_ids)
            if one.finish_reason is not None:
                deltas += self._parser.finish()
            events += self._events(self._blocks.feed(deltas))
            if one.finish_reason is not None:
                events += self._events(self._blocks.finish())
                events += self._stop(output, one)
        return events

    def end(self) -> Sequence[MessageEvent]:
        return [MessageStop()]

    def fail(self, error: ErrorBody) -> Sequence[MessagesError]:
        return [in_its_shape(error)]

    def _head(self, output: RequestOutput) -> Message:
        return Message(
            id=self._request.id_of(self._answer_id),
            model=self._served.names[0],
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=usage_of(output, 0),
        )

    def _events(self, pieces: Iterable[Piece]) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        for piece in pieces:
            match piece:
                case Begin():
                    self._index, self._kind = self._index + 1, piece.kind
                    events.append(ContentBlockStart(index=self._index, content_block=begun(piece)))
                case More(text):
                    if self._kind != "reasoning" or not hides_thinking(self._request):
                        delta = _DELTAS[self._kind](text)
                        events.append(ContentBlockDelta(index=self._index, delta=delta))
                case End():
                    events.append(ContentBlockStop(index=self._index))
        return events

    def _stop(self, output: RequestOutput, one: CompletionOutput) -> list[MessageEvent]:
        reason = why_it_stopped(
            self._request,
            self._served,
            one,
            num_tokens=len(output.prompt_token_ids) + self._num_generated,
            has_calls=self._blocks.has_calls,
        )
        sequence = str(one.stop_reason) if reason == "stop_sequence" else None
        stop = Stop(stop_reason=reason, stop_sequence=sequence)
        return [MessageDelta(delta=stop, usage=usage_of(output, self._num_generated))]


_DELTAS: dict[Kind, type[BlockDelta]] = {
    "reasoning": ThinkingDelta,
    "text": TextDelta,
    "call": InputJSONDelta,
}

"""A response in events, and a whole one, which is what the events add up to."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from jaxllm.openai.answer import TIMEOUT, check_finished
from jaxllm.openai.blocks import Begin, Blocks, End, More, Piece
from jaxllm.openai.errors import AnswerError, ErrorBody
from jaxllm.openai.logprobs import ChatTokenLogprob
from jaxllm.openai.message import MessageParser
from jaxllm.openai.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    Completed,
    Created,
    Failed,
    Incomplete,
    InProgress,
    ItemAdded,
    ItemDone,
    OutputTextDelta,
    OutputTextDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ResponseEvent,
)
from jaxllm.openai.responses.request import ResponsesRequest
from jaxllm.openai.responses.response import (
    FunctionCallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningText,
    Response,
    begun,
    ended,
    failed,
    filled,
    new_item,
)
from jaxllm.openai.responses.text_logprobs import TextLogprobs
from jaxllm.openai.responses.tools import with_namespaces
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import CompletionOutput, RequestOutput

Keep = Callable[[ResponsesRequest, Response], None]


def keep_nothing(request: ResponsesRequest, response: Response) -> None:
    """What is done with a response that nobody stores."""


def answer_response(
    request: ResponsesRequest,
    answer_id: str,
    created: int,
    outputs: Sequence[RequestOutput],
    served: ServedModel,
    *,
    keep: Keep = keep_nothing,
) -> Response:
    """Make the body of the answer; raise if the engine failed."""
    stream = ResponseStream(request, answer_id, created, served, keep=keep)
    (output,) = outputs
    stream.take(0, output)
    stream.end()
    return stream.response


class ResponseStream:
    """Makes the events of one response."""

    def __init__(
        self,
        request: ResponsesRequest,
        answer_id: str,
        created: int,
        served: ServedModel,
        *,
        keep: Keep = keep_nothing,
    ):
        self._request = request
        self._served = served
        self._keep = keep
        self._parser: MessageParser | None = None  # from the first output on
        self._blocks = Blocks()
        self._namespaces = with_namespaces(request.body.tools)
        self._num_events = 0
        self._num_generated = 0
        self._items: list[Item] = []
        self._texts: list[str] = []  # of the newest item
        self._logprobs: list[ChatTokenLogprob] = []  # of the whole text
        self._unsent: list[ChatTokenLogprob] = []  # of tokens whose text is held back
        self._by_token: TextLogprobs | None = None  # where only some tokens are of the text
        self.response = begun(request, created, served)

    def take(self, place: int, output: RequestOutput) -> Sequence[ResponseEvent]:
        """Make the events of an output; raise if the engine failed."""
        check_finished([output])
        events: list[ResponseEvent] = []
        if self._parser is None:
            self._parser = self._request.chat.parser(output.prompt, self._served)
            self._by_token = self._request.text_logprobs(self._served, output.prompt_token_ids)
            events.append(self._event(Created, response=self.response))
            events.append(self._event(InProgress, response=self.response))
        (one,) = output.outputs
        if one.stop_reason == TIMEOUT:
            raise AnswerError("the answer took longer than --request-timeout allows")
        self._num_generated += len(one.token_ids)
        is_cut = one.finish_reason == "length"
        for text, token_ids in self._given(one):
            events += self._events(self._blocks.feed(self._parser.feed(text, token_ids)))
        if one.finish_reason is not None:
            events += self._events(self._blocks.feed(self._parser.finish()))
        if one.finish_reason is not None:
            events += self._events(self._blocks.finish(), is_cut=is_cut)
            self.response = ended(
                self.response,
                output,
                self._items,
                num_generated=self._num_generated,
                num_reasoning=self._parser.num_reasoning_tokens,
                is_cut=is_cut,
            )
            kind = Incomplete if is_cut else Completed
            events.append(self._event(kind, response=self.response))
        return events

    def end(self) -> Sequence[ResponseEvent]:
        self._keep(self._request, self.response)
        return []

    def fail(self, error: ErrorBody) -> Sequence[ResponseEvent]:
        self.response = failed(msgspec.structs.replace(self.response, output=self._items), error)
        return [self._event(Failed, response=self.response)]

    def _given(self, one: CompletionOutput) -> Iterator[tuple[str, Sequence[int]]]:
        """Divide an output into what the parser is given at once."""
        found = self._request.chat.logprobs_of(one, self._served)
        if self._by_token is None:
            if found is not None:
                self._logprobs += found.content
                self._unsent += found.content
            yield one.text, one.token_ids
            return
        assert found is not None, "they are asked for"
        yield from self._by_token.give(one.text, one.token_ids, found.content)
        if one.finish_reason is not None:
            yield self._by_token.rest()

    def _events(self, pieces: Iterable[Piece], *, is_cut: bool = False) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        for piece in pieces:
            match piece:
                case Begin():
                    if self._by_token is not None:
                        self._by_token.begin()
                        self._logprobs = []  # of this item alone
                    item_id = f"{self._request.id[len('resp_') :]}_{len(self._items)}"
                    item = new_item(piece, item_id, self._namespaces)
                    self._items.append(item)
                    self._texts = []
                    events.append(self._of_item(ItemAdded, item=item))
                    if not isinstance(item, FunctionCallItem):
                        part = _part(item, "", [])
                        events.append(self._of_part(PartAdded, part=part))
                case More(text):
                    self._texts.append(text)
                    if self._by_token is not None:
                        is_shown = isinstance(self._items[-1], MessageItem)
                        self._unsent = self._by_token.tell(text, shows=is_shown)
                        self._logprobs += self._unsent
                    events.append(self._delta(text, self._unsent))
                    self._unsent = []
                case End():
                    events += self._done("incomplete" if is_cut else "completed")
        return events

    def _delta(self, text: str, logprobs: list[ChatTokenLogprob]) -> ResponseEvent:
        match self._items[-1]:
            case FunctionCallItem():
                return self._of_part(ArgumentsDelta, delta=text)
            case MessageItem():
                return self._of_part(OutputTextDelta, delta=text, logprobs=logprobs)
            case _:
                return self._of_part(ReasoningDelta, delta=text)

    def _done(self, status: Any) -> list[ResponseEvent]:
        text, item = "".join(self._texts), self._items[-1]
        item = self._items[-1] = filled(item, text, self._logprobs, status)
        events: list[ResponseEvent] = []
        match item:
            case FunctionCallItem():
                events.append(self._of_part(ArgumentsDone, name=item.name, arguments=text))
            case MessageItem():
                events.append(self._of_part(OutputTextDone, text=text, logprobs=self._logprobs))
            case _:
                events.append(self._of_part(ReasoningDone, text=text))
        if not isinstance(item, FunctionCallItem):
            events.append(self._of_part(PartDone, part=_part(item, text, self._logprobs)))
        return [*events, self._of_item(ItemDone, item=item)]

    def _event(self, kind: Callable[..., ResponseEvent], **fields: Any) -> ResponseEvent:
        number, self._num_events = self._num_events, self._num_events + 1
        return kind(sequence_number=number, **fields)

    def _of_item(self, kind: Callable[..., ResponseEvent], **fields: Any) -> ResponseEvent:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _of_part(self, kind: Callable[..., ResponseEvent], **fields: Any) -> ResponseEvent:
        return self._of_item(kind, item_id=self._items[-1].id, **fields)


def _part(item: Item, text: str, logprobs: list[ChatTokenLogprob]) -> OutputText | ReasoningText:
    if isinstance(item, MessageItem):
        return OutputText(text=text, logprobs=logprobs)
    return ReasoningText(text=text)

"""A chat answer in chunks. Each choice begins with its role and ends with its finish reason."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.openai.answer import Usage, check_finished
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.chat_answer import finish_reason
from jaxllm.openai.errors import ErrorBody
from jaxllm.openai.logprobs import ChatLogprobs
from jaxllm.openai.message import ChatDelta, MessageParser
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.streaming import UsageMeter
from jaxllm.outputs import CompletionOutput, RequestOutput


class ChunkChoice(msgspec.Struct, kw_only=True):
    """The new part of one choice. The last two fields are vLLM's."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a chat answer. The last field is vLLM's; only the first chunk has it."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatStream:
    """Makes the chunks of one answer."""

    def __init__(self, request: ChatRequest, answer_id: str, created: int, served: ServedModel):
        self._request = request
        self._served = served
        self._head = ChatChunk(
            id=request.id_of(answer_id),
            created=created,
            model=served.names[0],
            system_fingerprint=served.fingerprint,
            choices=[],
        )
        self._choices: dict[int, _Choice] = {}
        self._meter = UsageMeter(
            request.stream_options,
            lambda: (one.parser.num_reasoning_tokens for one in self._choices.values()),
        )

    def take(self, place: int, output: RequestOutput) -> list[ChatChunk]:
        """Make the chunks of an output; raise if the engine failed."""
        check_finished([output])
        self._meter.add(place, output)
        chunks = []
        for one in output.outputs:
            choice = self._choices.get(one.index)
            if choice is None:
                parser = self._request.parser(output.prompt, self._served)
                choice = self._choices[one.index] = _Choice(parser)
                chunks.append(self._begin(one.index, output))
            chunks += [self._chunk(part) for part in self._parts(choice, one)]
        return chunks

    def end(self) -> list[ChatChunk]:
        usage = self._meter.in_the_end
        return [] if usage is None else [msgspec.structs.replace(self._head, usage=usage)]

    def fail(self, error: ErrorBody) -> list[ErrorBody]:
        return [error]

    def _begin(self, index: int, output: RequestOutput) -> ChatChunk:
        first = self._chunk(ChunkChoice(index=index, delta=ChatDelta(role="assistant", content="")))
        if self._request.return_token_ids:
            first.prompt_token_ids = output.prompt_token_ids
        return first

    def _chunk(self, choice: ChunkChoice) -> ChatChunk:
        return msgspec.structs.replace(self._head, choices=[choice], usage=self._meter.of_chunk)

    def _parts(self, choice: "_Choice", one: CompletionOutput) -> Sequence[ChunkChoice]:
        """Make the parts of an output for one choice. The first part has all logprobs and token
        ids, even if the parser holds the text back."""
        deltas = choice.parser.feed(one.text, one.token_ids)
        if one.finish_reason is not None:
            deltas += choice.parser.finish()
        choice.has_calls |= any(delta.tool_calls for delta in deltas)
        parts = [ChunkChoice(index=one.index, delta=delta) for delta in deltas]
        logprobs = self._request.logprobs_of(one, self._served)
        shows_ids = bool(self._request.return_token_ids and one.token_ids)
        if not parts and ((logprobs and logprobs.content) or shows_ids):
            parts = [ChunkChoice(index=one.index, delta=ChatDelta())]
        if parts:
            parts[0].logprobs = logprobs
            if shows_ids:
                parts[0].token_ids = one.token_ids
        if one.finish_reason is not None:
            parts.append(
                ChunkChoice(
                    index=one.index,
                    delta=ChatDelta(),
                    finish_reason=finish_reason(self._request, one, choice.has_calls),
                    stop_reason=one.stop_reason,
                )
            )
        return parts


class _Choice:
    """The state of a choice until it ends."""

    def __init__(self, parser: MessageParser):
        self.parser = parser
        self.has_calls = False

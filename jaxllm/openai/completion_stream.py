"""A completion in chunks. With `echo`, the first chunk of each choice begins with the prompt."""

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.openai.answer import Usage, check_finished
from jaxllm.openai.completion_answer import shown
from jaxllm.openai.completions import CompletionRequest
from jaxllm.openai.errors import ErrorBody
from jaxllm.openai.logprobs import CompletionLogprobs, Position
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.streaming import UsageMeter
from jaxllm.outputs import RequestOutput


class CompletionChunkChoice(msgspec.Struct, kw_only=True):
    """The new part of one choice. The fields from `stop_reason` on are vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[Position | None] | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(msgspec.Struct, kw_only=True):
    """A chunk of a completion."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChunkChoice]
    usage: Usage | None | UnsetType = UNSET


class CompletionStream:
    """Makes the chunks of one answer."""

    def __init__(
        self, request: CompletionRequest, answer_id: str, created: int, served: ServedModel
    ):
        self._request = request
        self._served = served
        self._head = CompletionChunk(
            id=request.id_of(answer_id),
            created=created,
            model=served.names[0],
            system_fingerprint=served.fingerprint,
            choices=[],
        )
        self._meter = UsageMeter(request.stream_options)
        self._offsets: dict[int, int] = {}  # in the text of each choice, for logprobs
        self._prompt_logprobs: dict[int, list[Position | None] | None] = {}  # by prompt

    def take(self, place: int, output: RequestOutput) -> list[CompletionChunk]:
        """Make the chunks of an output; raise if the engine failed."""
        check_finished([output])
        request, served = self._request, self._served
        self._meter.add(place, output, hidden=request.is_mere_echo)
        # Only the first output for a prompt has them. Every choice of the prompt may show them.
        of_prompt = self._prompt_logprobs.setdefault(place, output.prompt_logprobs)
        chunks = []
        for one in output.outputs:
            index = (request.n or 1) * place + one.index
            is_first = index not in self._offsets
            part = shown(request, one, output, served, of_prompt if is_first else None, is_first)
            offset = self._offsets.get(index, 0)
            logprobs = part.logprobs(offset)
            if logprobs is not None:
                offset += sum(map(len, logprobs.tokens))
            self._offsets[index] = offset
            choice = CompletionChunkChoice(
                index=index,
                text=part.text,
                logprobs=logprobs,
                finish_reason=part.finish_reason,
                stop_reason=part.stop_reason,
            )
            if is_first and request.prompt_logprobs is not None:
                choice.prompt_logprobs = of_prompt
            if request.return_token_ids:
                choice.token_ids = one.token_ids
                if is_first:
                    choice.prompt_token_ids = output.prompt_token_ids
            chunks.append(
                msgspec.structs.replace(self._head, choices=[choice], usage=self._meter.of_chunk)
            )
        return chunks

    def end(self) -> list[CompletionChunk]:
        usage = self._meter.in_the_end
        return [] if usage is None else [msgspec.structs.replace(self._head, usage=usage)]

    def fail(self, error: ErrorBody) -> list[ErrorBody]:
        return [error]

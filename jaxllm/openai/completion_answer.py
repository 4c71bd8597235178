"""A whole completion, and the parts of an output that both it and a stream show."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from jaxllm.openai.answer import Usage, check_finished, usage_of
from jaxllm.openai.completions import CompletionRequest
from jaxllm.openai.logprobs import CompletionLogprobs, Position, TextOf, completion_logprobs
from jaxllm.openai.served_model import ServedModel, id_as_text
from jaxllm.outputs import CompletionOutput, RequestOutput


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation. The fields from `stop_reason` on are vLLM's."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_logprobs: list[Position | None] | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


class Completion(msgspec.Struct, kw_only=True):
    """The body of a completion answer."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    system_fingerprint: str
    kv_transfer_params: dict[str, Any] | None  # vLLM's


def answer_completion(
    request: CompletionRequest,
    answer_id: str,
    created: int,
    outputs: Sequence[RequestOutput],
    served: ServedModel,
) -> Completion:
    """Make the body of the answer; raise if the engine failed. Choices are ordered by prompt."""
    check_finished(outputs)
    choices = [
        _choice(request, len(output.outputs) * place + one.index, one, output, served)
        for place, output in enumerate(map(request.chosen, outputs))
        for one in output.outputs
    ]
    hidden = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return Completion(
        id=request.id_of(answer_id),
        created=created,
        model=served.names[0],
        system_fingerprint=served.fingerprint,
        choices=choices,
        usage=usage_of(outputs, num_hidden=hidden if request.is_mere_echo else 0),
        kv_transfer_params=_transfer(outputs),
    )


def _transfer(outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
    """Where the blocks of all prompts are; None if they are in several places."""
    first, *others = (output.kv_transfer_params for output in outputs)
    return first if all(other == first for other in others) else None


class Shown(NamedTuple):
    """The parts of an output that an answer shows."""

    text: str
    token_ids: list[int]
    positions: Sequence[Position | None] | None
    text_of: TextOf
    finish_reason: str | None
    stop_reason: int | str | None

    def logprobs(self, offset: int = 0) -> CompletionLogprobs | None:
        if self.positions is None:
            return None
        return completion_logprobs(self.token_ids, self.positions, self.text_of, offset)


def shown(
    request: CompletionRequest,
    one: CompletionOutput,
    output: RequestOutput,
    served: ServedModel,
    prompt_logprobs: list[Position | None] | None,
    with_prompt: bool,
) -> Shown:
    """Select the parts of an output that the answer shows. With `echo` and `with_prompt`, the
    prompt comes first."""
    token_ids, text = list(one.token_ids), one.text
    positions = None if request.logprobs is None else one.logprobs
    finish_reason, stop_reason = one.finish_reason, one.stop_reason
    if request.is_mere_echo:
        token_ids, positions, text = [], positions and [], ""
        finish_reason, stop_reason = finish_reason and "length", None
    if request.echo and with_prompt:
        token_ids = output.prompt_token_ids + token_ids
        text = _prompt_text(request, output, served) + text
        if positions is not None and prompt_logprobs is not None:
            positions = prompt_logprobs + positions
    text_of = id_as_text if request.return_tokens_as_token_ids else served.text_of
    return Shown(text, token_ids, positions, text_of, finish_reason, stop_reason)


def _choice(
    request: CompletionRequest,
    index: int,
    one: CompletionOutput,
    output: RequestOutput,
    served: ServedModel,
) -> CompletionChoice:
    part = shown(request, one, output, served, output.prompt_logprobs, with_prompt=True)
    return CompletionChoice(
        index=index,
        text=part.text,
        logprobs=part.logprobs(),
        finish_reason=part.finish_reason,
        stop_reason=part.stop_reason,
        prompt_logprobs=None if request.prompt_logprobs is None else output.prompt_logprobs,
        prompt_token_ids=output.prompt_token_ids if request.return_token_ids else None,
        token_ids=one.token_ids if request.return_token_ids else None,
    )


def _prompt_text(request: CompletionRequest, output: RequestOutput, served: ServedModel) -> str:
    if output.prompt is not None and request.truncate_prompt_tokens is None:
        return output.prompt
    if served.tokenizer is None:
        return ""
    return served.tokenizer.decode(
        output.prompt_token_ids, skip_special_tokens=request.skip_special_tokens is not False
    )

"""/v1/completions: prompts in, their continuations out."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from jaxllm.errors import refused
from jaxllm.messages import CompletionOutput, PromptType, RequestOutput, TextPrompt, TokensPrompt
from jaxllm.openai.answer import Usage, check_finished, usage_of
from jaxllm.openai.completion_stream import CompletionStream
from jaxllm.openai.fields import RequestFields
from jaxllm.openai.logprobs import CompletionLogprobs, Position, TextOf, completion_logprobs
from jaxllm.openai.served_model import ServedModel, id_as_text
from jaxllm.sampling_params import SamplingParams

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16


class CompletionRequest(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a completion request."""

    NEUTRAL: ClassVar = {
        "add_generation_prompt": (),
        "chat_template": (),
        "chat_template_kwargs": (),
        "continue_final_message": (),
        "max_completion_tokens": (),
        "messages": (),
        "top_logprobs": (),
    }

    prompt: Any  # one prompt or several, each a string or a list of token ids
    logprobs: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def num_prompts(self) -> int:
        return len(self._given)

    @property
    def num_prompt_copies(self) -> int:
        """Each of the n choices begins with the prompt, or has it beside its text."""
        is_shown = self.echo or self.return_token_ids or self.prompt_logprobs is not None
        return (self.n or 1) if is_shown else 0

    def prompts(self, served: ServedModel) -> list[PromptType]:
        """Each of the prompts."""
        num = self.num_prompts
        if num > MAX_PROMPTS:
            raise refused("prompt", f"{num} prompts", f"at most {MAX_PROMPTS} are allowed")
        return [self._prompt(place, one, served) for place, one in enumerate(self._given)]

    def sampling_params(self, served: ServedModel) -> SamplingParams:
        """With `echo` the prompt has logprobs, too."""
        params: dict[str, Any] = {"logprobs": self.logprobs}
        asked = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        # The engine always makes one token; of a mere echo it is not shown.
        params["max_tokens"] = 1 if self.is_mere_echo else asked
        if self.echo and self.prompt_logprobs is None:
            params["prompt_logprobs"] = self.logprobs
        return self.params_over(served, **params)

    def names_of_fields(self, place: int | None) -> dict[str, str]:
        name = "prompt" if place is None or not self._has_several else f"prompt[{place}]"
        names = {"prompt": name, "prompt_token_ids": name}
        if self.echo and self.prompt_logprobs is None:
            names["prompt_logprobs"] = "logprobs"
        if self.n in (None, 1):  # it is the prompts that are too many
            names["n"] = "prompt"
        return super().names_of_fields(place) | names

    def answer(
        self, answer_id: str, created: int, outputs: Sequence[RequestOutput], served: ServedModel
    ) -> "Completion":
        """The body of the answer; raises if the engine failed. Choices are ordered by prompt."""
        check_finished(outputs)
        choices = [
            self._choice(len(output.outputs) * place + one.index, one, output, served)
            for place, output in enumerate(outputs)
            for one in output.outputs
        ]
        hidden = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        return Completion(
            id=self._id(answer_id),
            created=created,
            model=served.names[0],
            system_fingerprint=served.fingerprint,
            choices=choices,
            usage=usage_of(outputs, num_hidden=hidden if self.is_mere_echo else 0),
        )

    def streamed_answer(
        self, answer_id: str, created: int, served: ServedModel
    ) -> CompletionStream:
        """The body of the answer in chunks. Choices are numbered by prompt."""
        return CompletionStream(self, self._id(answer_id), created, served)

    @property
    def is_mere_echo(self) -> bool:
        """Whether only the prompt is wanted back, for its logprobs."""
        return bool(self.echo) and self.max_tokens == 0

    @property
    def _given(self) -> list[Any]:
        return self.prompt if self._has_several else [self.prompt]

    @property
    def _has_several(self) -> bool:
        given = self.prompt
        return isinstance(given, list) and bool(given) and isinstance(given[0], str | list)

    def _id(self, answer_id: str) -> str:
        return f"cmpl-{self.request_id or answer_id}"

    def _prompt(self, place: int, given: object, served: ServedModel) -> PromptType:
        prompt: TextPrompt | TokensPrompt
        if isinstance(given, str):
            if self.add_special_tokens is False and served.tokenizer is not None:
                length = served.prompt_length(self.truncate_prompt_tokens)
                ids = length.encode(served.tokenizer, given, add_special_tokens=False)
                prompt = TokensPrompt(prompt=given, prompt_token_ids=ids)
            else:
                prompt = TextPrompt(prompt=given)
        elif isinstance(given, list):
            prompt = TokensPrompt(prompt_token_ids=given)
        else:
            raise refused(
                self.names_of_fields(place)["prompt"],
                given,
                "it must be a string, a list of token ids, or a list of several of these",
            )
        if self.cache_salt is not None:
            prompt["cache_salt"] = self.cache_salt
        return prompt

    def shown(
        self,
        one: CompletionOutput,
        output: RequestOutput,
        served: ServedModel,
        prompt_logprobs: list[Position | None] | None,
        with_prompt: bool,
    ) -> "Shown":
        """What the answer shows of an output, with `echo` also of its prompt, or of a part of the
        output without it."""
        token_ids, positions, text = list(one.token_ids), one.logprobs, one.text
        finish_reason, stop_reason = one.finish_reason, one.stop_reason
        if self.is_mere_echo:
            token_ids, positions, text = [], positions and [], ""
            finish_reason, stop_reason = finish_reason and "length", None
        if self.echo and with_prompt:
            token_ids = output.prompt_token_ids + token_ids
            text = self._prompt_text(output, served) + text
            if positions is not None and prompt_logprobs is not None:
                positions = prompt_logprobs + positions
        text_of = id_as_text if self.return_tokens_as_token_ids else served.text_of
        return Shown(text, token_ids, positions, text_of, finish_reason, stop_reason)

    def _choice(
        self, index: int, one: CompletionOutput, output: RequestOutput, served: ServedModel
    ) -> "CompletionChoice":
        shown = self.shown(one, output, served, output.prompt_logprobs, with_prompt=True)
        return CompletionChoice(
            index=index,
            text=shown.text,
            logprobs=shown.logprobs(),
            finish_reason=shown.finish_reason,
            stop_reason=shown.stop_reason,
            prompt_logprobs=None if self.prompt_logprobs is None else output.prompt_logprobs,
            prompt_token_ids=output.prompt_token_ids if self.return_token_ids else None,
            token_ids=one.token_ids if self.return_token_ids else None,
        )

    def _prompt_text(self, output: RequestOutput, served: ServedModel) -> str:
        if output.prompt is not None and self.truncate_prompt_tokens is None:
            return output.prompt
        if served.tokenizer is None:
            return ""
        return served.tokenizer.decode(
            output.prompt_token_ids, skip_special_tokens=self.skip_special_tokens is not False
        )


class Shown(NamedTuple):
    """Of an output, what an answer shows."""

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

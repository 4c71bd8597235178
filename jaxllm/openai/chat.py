"""/v1/chat/completions: a conversation in, the next message out."""

from collections.abc import Sequence
from typing import Any, Self

import msgspec

from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.tokenizer import render_chat
from jaxllm.messages import CompletionOutput, PromptType, RequestOutput
from jaxllm.openai.answer import Usage, check_finished, usage_of
from jaxllm.openai.fields import RequestFields, read_body
from jaxllm.openai.logprobs import ChatLogprobs, Position, chat_logprobs
from jaxllm.openai.served_model import ServedModel, id_as_text
from jaxllm.sampling_params import SamplingParams

# Of completions, or of templates that a request brings: it may not bring programs.
_NOT_OF_CHAT = {"add_special_tokens": (False,), "chat_template": (), "echo": (False,)}


class ChatRequest(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a chat request."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def read(cls, body: object) -> Self:
        return read_body(body, cls, _NOT_OF_CHAT)

    def prompts(self, served: ServedModel) -> list[PromptType]:
        """The conversation, written out by the model's template."""
        if served.tokenizer is None:
            raise ValidationError(
                "chat needs a tokenizer, but skip_tokenizer_init=True", parameter="messages"
            )
        prompt = render_chat(
            served.tokenizer,
            self.messages,
            chat_template=served.chat_template,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            chat_template_kwargs=self.chat_template_kwargs,
        )
        if self.cache_salt is not None:
            prompt["cache_salt"] = self.cache_salt
        return [prompt]

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """By default an answer may be as long as the context has room."""
        if None not in (self.max_tokens, self.max_completion_tokens):
            if self.max_tokens != self.max_completion_tokens:
                raise refused(
                    "max_completion_tokens",
                    self.max_completion_tokens,
                    f"max_tokens={self.max_tokens} says otherwise; give one of them",
                )
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", self.top_logprobs, "it needs logprobs=true")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.params_over(defaults, max_tokens=most, logprobs=logprobs)

    def answer(
        self, answer_id: str, created: int, outputs: Sequence[RequestOutput], served: ServedModel
    ) -> "ChatCompletion":
        """The body of the answer; raises if the engine failed."""
        check_finished(outputs)
        (output,) = outputs
        return ChatCompletion(
            id=f"chatcmpl-{self.request_id or answer_id}",
            created=created,
            model=served.names[0],
            choices=[self._choice(one, served) for one in output.outputs],
            usage=usage_of(outputs),
            prompt_logprobs=output.prompt_logprobs,
            prompt_token_ids=output.prompt_token_ids if self.return_token_ids else None,
        )

    def _choice(self, one: CompletionOutput, served: ServedModel) -> "ChatChoice":
        logprobs = None
        if one.logprobs is not None:
            text_of = id_as_text if self.return_tokens_as_token_ids else served.text_of
            logprobs = chat_logprobs(one.logprobs, self.top_logprobs or 0, text_of)
        return ChatChoice(
            index=one.index,
            message=ChatMessage(content=one.text),
            logprobs=logprobs,
            finish_reason=one.finish_reason,
            stop_reason=one.stop_reason,
            token_ids=one.token_ids if self.return_token_ids else None,
        )


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The body of a chat answer. The last two fields are vLLM's."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    prompt_logprobs: list[Position | None] | None
    prompt_token_ids: list[int] | None

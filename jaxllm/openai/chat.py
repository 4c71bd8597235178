"""Requests to /v1/chat/completions: the next message of a conversation."""

from functools import partial
from typing import Any, ClassVar

from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.tokenizer import TextLength, render_chat
from jaxllm.openai.fields import RequestFields
from jaxllm.openai.logprobs import ChatLogprobs, chat_logprobs
from jaxllm.openai.message import MessageParser
from jaxllm.openai.served_model import ServedModel, id_as_text
from jaxllm.openai.tools import Tool, offered_tools
from jaxllm.outputs import CompletionOutput
from jaxllm.prompts import PromptType, TokensPrompt
from jaxllm.sampling_params import SamplingParams

MAX_MESSAGES = 8192
MAX_TEMPLATE_CHARS = 1 << 18


class ChatRequest(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a chat request."""

    NEUTRAL: ClassVar = {"add_special_tokens": (False,), "echo": (False,)}

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None  # only in requests to the server
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_prompt_copies(self) -> int:
        return int(self.prompt_logprobs is not None or bool(self.return_token_ids))

    def prompts(self, served: ServedModel) -> list[PromptType]:
        """Return the conversation as one prompt, rendered by the model's template."""
        prompt = self.prompt(served, served.prompt_length(self.truncate_prompt_tokens))
        if self.cache_salt is not None:
            prompt["cache_salt"] = self.cache_salt
        return [prompt]

    def prompt(self, served: ServedModel, length: TextLength) -> TokensPrompt:
        """Render the conversation; raise if it is too long."""
        if served.tokenizer is None:
            raise ValidationError(
                "chat needs a tokenizer, but skip_tokenizer_init=True", parameter="messages"
            )
        if self.chat_template is not None and not served.trust_request_chat_template:
            raise refused(
                "chat_template",
                self.chat_template,
                "it is a program; the server runs it only if it was started with "
                "--trust-request-chat-template",
            )
        if len(self.messages) > MAX_MESSAGES:
            given = f"{len(self.messages)} messages"
            raise refused("messages", given, f"at most {MAX_MESSAGES} are allowed")
        if len(self.chat_template or "") > MAX_TEMPLATE_CHARS:
            given = f"{len(self.chat_template or '')} characters"
            raise refused("chat_template", given, f"at most {MAX_TEMPLATE_CHARS} are allowed")
        return render_chat(
            served.tokenizer,
            self.messages,
            chat_template=self.chat_template or served.chat_template,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            tools=self._tools(served),
            chat_template_kwargs=self.chat_template_kwargs,
            render=partial(
                served.renderer.render,
                is_foreign=is_foreign(self.chat_template, self.chat_template_kwargs),
            ),
            length=length,
        )

    def sampling_params(self, served: ServedModel) -> SamplingParams:
        """Return the sampling parameters. By default the model's recommendation limits the answer,
        or else the context length."""
        if None not in (self.max_tokens, self.max_completion_tokens):
            if self.max_tokens != self.max_completion_tokens:
                raise refused(
                    "max_completion_tokens",
                    self.max_completion_tokens,
                    f"max_tokens={self.max_tokens} says otherwise; give one of them",
                )
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.stream and self.prompt_logprobs is not None:
            raise refused(
                "prompt_logprobs", self.prompt_logprobs, "a streamed chat has no place for them"
            )
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", self.top_logprobs, "it needs logprobs=true")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params = self.params_over(served, max_tokens=most, logprobs=logprobs)
        if served.answer_format.needs_special_tokens(self._tools(served) is not None):
            params.skip_special_tokens = False
        return params

    def names_of_fields(self, place: int | None) -> dict[str, str]:
        names = {"logprobs": "top_logprobs", "prompt": "messages", "prompt_token_ids": "messages"}
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        return super().names_of_fields(place) | names

    def parser(self, prompt: str | None, served: ServedModel) -> MessageParser:
        """Make the parser for one answer to this prompt."""
        parser = served.answer_format.parser(
            prompt,
            self._tools(served),
            enable_thinking=(self.chat_template_kwargs or {}).get("enable_thinking") is not False,
            text_of=served.text_of,
        )
        return MessageParser(
            parser,
            parallel_calls=self.parallel_tool_calls is not False,
            show_reasoning=self.include_reasoning is not False,
        )

    def logprobs_of(self, one: CompletionOutput, served: ServedModel) -> ChatLogprobs | None:
        if one.logprobs is None:
            return None
        text_of = id_as_text if self.return_tokens_as_token_ids else served.text_of
        return chat_logprobs(one.logprobs, self.top_logprobs or 0, text_of, served.bytes_of)

    def id_of(self, answer_id: str) -> str:
        return f"chatcmpl-{self.request_id or answer_id}"

    def _tools(self, served: ServedModel) -> list[dict[str, Any]] | None:
        can_parse = served.answer_format.tools is not None
        return offered_tools(self.tools, self.tool_choice, can_parse)


def is_foreign(chat_template: object, chat_template_kwargs: object) -> bool:
    """Whether a request's own input may make the template run long. The model's own template is
    safe with messages, which it was written for, and with switches that are on or off."""
    if chat_template is not None:
        return True
    given = chat_template_kwargs.values() if isinstance(chat_template_kwargs, dict) else ()
    return not all(isinstance(value, bool | None) for value in given)

"""Requests to /v1/chat/completions: the next message of a conversation."""

from functools import partial
from typing import Any, Literal, Self, get_args

from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.chat_messages import text_of_content
from jaxllm.frontend.tokenizer import (
    TextLength,
    Tokenizer,
    find_chat_template,
    render_chat,
)
from jaxllm.openai.fields import RequestFields
from jaxllm.openai.history import check_calls
from jaxllm.openai.logprobs import ChatLogprobs, chat_logprobs
from jaxllm.openai.message import MessageParser
from jaxllm.openai.served_model import ServedModel, id_as_text
from jaxllm.openai.tool_forms import (
    field_of_part,
    form_of_named,
    form_of_required,
    form_of_strict,
)
from jaxllm.openai.tools import Tool, check_can_be_strict, named_tool, offered_tools
from jaxllm.openai.wording import renamed
from jaxllm.outputs import CompletionOutput
from jaxllm.parsers.answer_format import AnswerFormat
from jaxllm.parsers.reasoning.base import Reasoning
from jaxllm.parsers.tools.chosen import ANY_CALL, call_of
from jaxllm.prompts import PromptType, TokensPrompt
from jaxllm.sampling_params import SamplingParams, StructuredOutputsParams

MAX_MESSAGES = 8192
MAX_TEMPLATE_CHARS = 1 << 18

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Fields, and variables of templates.
_EFFORT, _DOCUMENTS = "reasoning_effort", "documents"
_THINKING = ("enable_thinking", "thinking")  # switches of templates, which have either


class ChatRequest(RequestFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a chat request."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    chat_template: str | None = None  # only in requests to the server
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def conversation(self) -> Self:
        return self

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_prompt_copies(self) -> int:
        return int(self.prompt_logprobs is not None or bool(self.return_token_ids))

    def prompts(self, served: ServedModel) -> list[PromptType]:
        """Return the conversation as one prompt, rendered by the model's template."""
        check_calls(self.messages)
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
            chat_template_kwargs=self._template_kwargs(served.tokenizer, served),
            render=partial(
                served.renderer.render,
                is_foreign=is_foreign(self.chat_template, self.chat_template_kwargs),
            ),
            length=length,
            add_special_tokens=bool(self.add_special_tokens),
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
        if self._format(served).needs_special_tokens(self._tools(served) is not None):
            params.skip_special_tokens = False
        return params

    def names_of_fields(self, place: int | None) -> dict[str, str]:
        names = {"logprobs": "top_logprobs", "prompt": "messages", "prompt_token_ids": "messages"}
        names["multi_modal_data"] = "messages"
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        return super().names_of_fields(place) | names

    def in_its_words(self, error: ValidationError, place: int | None = None) -> ValidationError:
        names = self.names_of_fields(place)
        part = error.parameter or ""
        if self.tools and self.structured_outputs is None:
            field = field_of_part(part, self.tools, named_tool(self.tool_choice))
            names |= {} if field is None else {part: field}
        return renamed(error, names)

    def parser(self, prompt: str | None, served: ServedModel) -> MessageParser:
        """Make the parser for one answer to this prompt."""
        parser = self._format(served).parser(
            prompt,
            self._tools(served),
            enable_thinking=self._enable_thinking,
            text_of=served.text_of,
        )
        return MessageParser(
            parser,
            parallel_calls=self.parallel_tool_calls is not False,
            show_reasoning=self.include_reasoning is not False,
            echoed=self._echoed,
        )

    def form(self, served: ServedModel) -> StructuredOutputsParams | None:
        asked = super().form(served)
        of_calls = self._form_of_calls(served)
        if of_calls is None:
            return asked
        if self.structured_outputs is not None or (asked is not None and not self._must_call):
            raise refused(
                "tool_choice" if self._must_call else "tools",
                self.tool_choice or "auto",
                "these calls have a form, and so have structured_outputs and response_format; "
                "leave them out",
            )
        return of_calls  # an answer that must call has no content

    def reasoning(self, served: ServedModel) -> Reasoning | None:
        tags = served.answer_format.reasoning
        return None if tags is None else Reasoning(tags, self._enable_thinking)

    @property
    def names_its_call(self) -> bool:
        """Whether the request says which function the answer calls."""
        return named_tool(self.tool_choice) is not None

    def logprobs_of(self, one: CompletionOutput, served: ServedModel) -> ChatLogprobs | None:
        if one.logprobs is None:
            return None
        text_of = id_as_text if self.return_tokens_as_token_ids else served.text_of
        return chat_logprobs(one.logprobs, self.top_logprobs or 0, text_of, served.bytes_of)

    def id_of(self, answer_id: str) -> str:
        return f"chatcmpl-{self.request_id or answer_id}"

    def _template_kwargs(self, tokenizer: Tokenizer, served: ServedModel) -> dict[str, Any] | None:
        """The variables of the template, with those that fields of the request say."""
        given = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is None and self.documents is None:
            return given or None
        own = self.chat_template or served.chat_template
        template = find_chat_template(tokenizer, own, self._tools(served))
        fields: dict[str, Any] = {_EFFORT: self.reasoning_effort, _DOCUMENTS: self.documents}
        for field, value in fields.items():
            if value is None:
                continue
            known = [name for name in _variables_of(field, value) if name in template]
            if not known:
                raise refused(field, value, "the model's chat template does not know it; omit it")
            for name in known:
                value = False if name in _THINKING else value
                if given.setdefault(name, value) != value:
                    why = "chat_template_kwargs says otherwise; give one of them"
                    raise refused(field, fields[field], why)
        return given

    @property
    def _enable_thinking(self) -> bool:
        given = (self.chat_template_kwargs or {}).get("enable_thinking")
        return given is not False and self.reasoning_effort != "none"

    @property
    def _echoed(self) -> str:
        """The text that the answer repeats: that of the message which it goes on with."""
        last = self.messages[-1] if self.echo and self.messages else {}
        return text_of_content(last.get("content")) if last.get("role") == "assistant" else ""

    @property
    def _must_call(self) -> bool:
        return self.tool_choice == "required" or self.names_its_call

    def _format(self, served: ServedModel) -> AnswerFormat:
        """The format of the answer, in which calls that were asked for have one of their own."""
        if not self._must_call:
            return served.answer_format
        name = named_tool(self.tool_choice)
        return served.answer_format._replace(tools=ANY_CALL if name is None else call_of(name))

    def _form_of_calls(self, served: ServedModel) -> StructuredOutputsParams | None:
        """The form of the answer's calls, if they must have one."""
        if self._tools(served) is None or self.tools is None:
            return None
        name, parallel = named_tool(self.tool_choice), self.parallel_tool_calls is not False
        if name is not None:
            return form_of_named(self.tools, name)
        if self._must_call:
            return form_of_required(self.tools, parallel=parallel)
        calls = served.answer_format.tools
        if calls is None or not any(tool.function.strict for tool in self.tools):
            return None
        check_can_be_strict(self.tools, calls)
        return form_of_strict(self.tools, calls, parallel=parallel)

    def _tools(self, served: ServedModel) -> list[dict[str, Any]] | None:
        can_parse = served.answer_format.tools is not None
        return offered_tools(self.tools, self.tool_choice, can_parse)


def _variables_of(field: str, value: object) -> tuple[str, ...]:
    """The variables of templates that say the same as a field of the request."""
    return (field, *_THINKING) if field == _EFFORT and value == "none" else (field,)


def is_foreign(chat_template: object, chat_template_kwargs: object) -> bool:
    """Whether a request's own input may make the template run long. The model's own template is
    safe with messages, which it was written for, with switches that are on or off, and with the
    words for an effort."""
    if chat_template is not None:
        return True
    given = chat_template_kwargs.values() if isinstance(chat_template_kwargs, dict) else ()
    efforts = get_args(ReasoningEffort)
    return not all(isinstance(value, bool | None) or value in efforts for value in given)

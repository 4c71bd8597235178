"""Requests to /v1/responses, each of which becomes a chat request.

As in `jaxllm.anthropic.request`, the chat request renders the prompt, has the sampling parameters
and parses the answer.
"""

import uuid
from typing import Any, Literal, Self

import msgspec

from jaxllm.errors import ValidationError, refused
from jaxllm.openai.chat import ChatRequest, ReasoningEffort
from jaxllm.openai.fields import read_fields
from jaxllm.openai.responses.history import read_items, with_instructions
from jaxllm.openai.responses.text_logprobs import TextLogprobs
from jaxllm.openai.responses.tools import ResponsesTool, chat_tool_choice, chat_tools, places_of
from jaxllm.openai.responses.truncation import prompts_that_fit
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.wording import renamed
from jaxllm.parsers.reasoning.base import Reasoning
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import SamplingParams


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the text is written. No chat template has a word for its length but the usual one."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How hard the model thinks, for templates that know it. Its reasoning is in the answer as it
    is, so nobody makes a summary."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: Literal[False] | None = None


class ResponsesBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a request to /v1/responses."""

    model: str | None = None
    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = (
        None
    )
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    # Without effect: a coding agent tells here who it is.
    client_metadata: dict[str, Any] | None = None
    # Without effect here; the answer repeats them.
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Any = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    # This engine's own.
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    priority: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    top_k: int | None = None
    vllm_xargs: dict[str, Any] | None = None


# Fields with the same name and meaning in a chat request.
_SAME = (
    "model", "stream", "temperature", "top_p", "parallel_tool_calls", "cache_salt", "ignore_eos",
    "min_p", "min_tokens", "presence_penalty", "frequency_penalty", "priority",
    "repetition_penalty", "seed", "stop", "top_k", "vllm_xargs",
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"


class ResponsesRequest:
    """A request for a response."""

    def __init__(self, body: ResponsesBody, items: list[Any], chat: ChatRequest):
        self.body = body
        self.items = items  # all that the prompt is made of
        self.chat = chat
        # Not the client's: whoever knows the id of a stored response may read it.
        self.id = f"resp_{uuid.uuid4().hex}"

    @classmethod
    def read(cls, body: object, *, live: bool = False) -> Self:
        return cls.after([], read_fields(body, ResponsesBody), live=live)

    @classmethod
    def after(cls, before: list[Any], body: ResponsesBody, *, live: bool) -> Self:
        """Make a request that goes on after the items of an earlier response."""
        given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
        new = body.input
        if isinstance(new, str):
            new = [{"type": "message", "role": "user", "content": new}]
        items = [*before, *new]
        fields = _chat_fields(items, len(before), body)
        given |= {name: value for name, value in fields.items() if value is not None}
        try:
            return cls(body, items, ChatRequest.read(given, live=live))
        except ValidationError as error:
            raise _in_its_words(error, body) from error

    @property
    def conversation(self) -> ChatRequest:
        return self.chat

    @property
    def model(self) -> str | None:
        return self.body.model

    @property
    def priority(self) -> int | None:
        return self.body.priority

    @property
    def n(self) -> int | None:
        return None

    @property
    def truncate_prompt_tokens(self) -> int | None:
        return None

    @property
    def stream(self) -> bool | None:
        return self.body.stream

    @property
    def is_background(self) -> bool:
        return bool(self.body.background)

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_prompt_copies(self) -> int:
        return 0

    def prompts(self, served: ServedModel) -> list[PromptType]:
        if self.body.truncation != "auto":
            return self.chat.prompts(served)
        return prompts_that_fit(self.chat, served, self.body.max_output_tokens)

    def sampling_params(self, served: ServedModel) -> SamplingParams:
        try:
            return self.chat.sampling_params(served)
        except ValidationError as error:
            raise _in_its_words(error, self.body) from error

    def text_logprobs(
        self, served: ServedModel, prompt_token_ids: list[int]
    ) -> TextLogprobs | None:
        """What finds the tokens of the answer's text; None: all are, or nobody asks for them."""
        form = served.answer_format
        is_parsed = form.reasoning or self.chat.tools
        if not self.chat.logprobs or not is_parsed or served.tokenizer is None:
            return None
        params = self.sampling_params(served)
        return TextLogprobs(
            served.tokenizer.detokenizer.stream(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_token_ids=prompt_token_ids,
            )
        )

    def beam_search(self, params: SamplingParams, served: ServedModel) -> None:
        return None

    def reasoning(self, served: ServedModel) -> Reasoning | None:
        return self.chat.reasoning(served)

    def id_of(self, answer_id: str) -> str:
        return self.id

    def in_its_words(self, error: ValidationError, place: int | None = None) -> ValidationError:
        return _in_its_words(self.chat.in_its_words(error, place), self.body)


def _chat_fields(items: list[Any], num_before: int, body: ResponsesBody) -> dict[str, Any]:
    if len(items) == num_before:
        raise ValidationError("input is empty; give a text or an item", parameter="input")
    messages = read_items(items, num_before=num_before)
    if body.top_logprobs and _LOGPROBS not in (body.include or ()):
        raise refused("top_logprobs", body.top_logprobs, f"it needs include=[{_LOGPROBS!r}]")
    wants_logprobs = _LOGPROBS in (body.include or ())
    return {
        "messages": with_instructions(body.instructions, messages),
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": wants_logprobs or None,
        "top_logprobs": body.top_logprobs,
        "tools": chat_tools(body.tools),
        "tool_choice": chat_tool_choice(body.tool_choice),
        "response_format": _response_format(body.text),
        "chat_template_kwargs": _template_kwargs(body),
    }


def _response_format(text: TextConfig | None) -> dict[str, Any] | None:
    form = text and text.format
    if form and form.name is not None and not 1 <= len(form.name) <= 64:
        raise refused("text.format.name", form.name, "a name has 1 to 64 characters")
    if not form or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.name is None or form.schema is None:
        raise refused("text.format", form.type, "a JSON schema has a name and a schema")
    fields = ("name", "description", "schema", "strict")
    schema = {one: value for one in fields if (value := getattr(form, one)) is not None}
    return {"type": "json_schema", "json_schema": schema}


def _template_kwargs(body: ResponsesBody) -> dict[str, Any] | None:
    """The variables of the template. Those that it does not know have no effect."""
    given = dict(body.chat_template_kwargs or {})
    effort = body.reasoning and body.reasoning.effort
    if effort:
        given.setdefault("reasoning_effort", effort)
        if effort == "none":
            for name in ("enable_thinking", "thinking"):  # templates have either
                given.setdefault(name, False)
    return given or None


def _in_its_words(error: ValidationError, body: ResponsesBody) -> ValidationError:
    """Rename the fields in an error of the chat request."""
    names = {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
    }
    names |= {f"tools[{i}].function": where for i, where in enumerate(places_of(body.tools))}
    return renamed(error, names)

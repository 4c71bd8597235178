"""Requests to /v1/messages, each of which becomes a chat request.

The fields are Anthropic's, and some that this engine has besides. The chat request does the rest:
it renders the prompt, has the sampling parameters and parses the answer. So an answer is the same
through either protocol.
"""

from typing import Any, Literal, Self

import msgspec

from jaxllm.anthropic.history import read_history
from jaxllm.errors import ValidationError, refused
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.fields import read_fields
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.wording import renamed
from jaxllm.parsers.reasoning.base import Reasoning
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import SamplingParams

_LEAST_BUDGET = 1024


class MessagesTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client. The last three fields have no effect here."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None


class MessagesToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the answer must call a tool, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks. A chat template has no bound for it, so the budget is a hint: it is
    checked, and max_tokens bounds thinking and answer together."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON schema that the answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the answer, and how hard the model tries, for templates that know it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class PromptFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that determine a prompt."""

    model: str | None = None
    messages: list[Any]
    system: str | list[Any] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # Without effect: all prefixes are cached.
    cache_control: Any = None
    # This engine's own.
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensRequest(PromptFields):
    """The body of a request to /v1/messages/count_tokens."""


class MessagesBody(PromptFields):
    """The body of a request to /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    # Without effect.
    metadata: Any = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # This engine's own.
    ignore_eos: bool | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    priority: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    cache_salt: str | None = None
    vllm_xargs: dict[str, Any] | None = None


# Fields with the same name and meaning in a chat request.
_SAME = (
    "model", "max_tokens", "stream", "temperature", "top_p", "top_k", "ignore_eos", "min_p",
    "min_tokens", "priority", "repetition_penalty", "seed", "cache_salt", "vllm_xargs",
)  # fmt: skip


class MessagesRequest:
    """A request for a message."""

    def __init__(self, body: MessagesBody, chat: ChatRequest):
        self.body = body
        self.chat = chat

    @classmethod
    def read(cls, body: object, *, live: bool = False) -> Self:
        fields = read_fields(without_neutral(body), MessagesBody)
        thinking = fields.thinking
        if thinking is not None and thinking.budget_tokens is not None:
            if fields.max_tokens <= thinking.budget_tokens:
                raise refused(
                    "thinking.budget_tokens",
                    thinking.budget_tokens,
                    f"it must be below max_tokens={fields.max_tokens}",
                )
        chat = {name: getattr(fields, name) for name in _SAME}
        chat |= {"stop": fields.stop_sequences} | chat_fields(fields)
        given = {name: value for name, value in chat.items() if value is not None}
        try:
            return cls(fields, ChatRequest.read(given, live=live))
        except ValidationError as error:
            raise in_its_words(error) from error

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
        return False

    @property
    def num_prompts(self) -> int:
        return 1

    @property
    def num_prompt_copies(self) -> int:
        return 0

    def prompts(self, served: ServedModel) -> list[PromptType]:
        return self.chat.prompts(served)

    def sampling_params(self, served: ServedModel) -> SamplingParams:
        try:
            return self.chat.sampling_params(served)
        except ValidationError as error:
            raise in_its_words(error) from error

    def beam_search(self, params: SamplingParams, served: ServedModel) -> None:
        return None

    def reasoning(self, served: ServedModel) -> Reasoning | None:
        return self.chat.reasoning(served)

    def id_of(self, answer_id: str) -> str:
        return f"msg_{answer_id}"

    def in_its_words(self, error: ValidationError, place: int | None = None) -> ValidationError:
        return in_its_words(self.chat.in_its_words(error, place))


# Fields that are not supported, and the values at which they ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
    "diagnostics": (),
    "inference_geo": ("global",),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}


def without_neutral(body: object) -> object:
    """The body without fields that are not supported; refuse them if they ask for something."""
    if not isinstance(body, dict):
        return body
    for name, values in _NEUTRAL.items():
        if body.get(name) is not None and body[name] not in values:
            raise refused(name, body[name], "not supported; leave it out")
    return {name: value for name, value in body.items() if name not in _NEUTRAL}


def chat_fields(fields: PromptFields) -> dict[str, Any]:
    """The fields of a chat request that determine the same prompt; None stands for none."""
    history = read_history(fields.system, fields.messages)
    chosen, config = fields.tool_choice, fields.output_config
    parallel = None
    if chosen is not None and chosen.disable_parallel_tool_use is not None:
        parallel = not chosen.disable_parallel_tool_use
    form = config and config.format
    return {
        "messages": history.messages,
        "add_generation_prompt": not history.is_begun,
        "continue_final_message": history.is_begun or None,
        "tools": _tools(fields.tools),
        "tool_choice": _tool_choice(chosen),
        "parallel_tool_calls": parallel,
        "response_format": form
        and {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema}},
        "chat_template_kwargs": _template_kwargs(fields),
    }


def _tools(tools: list[MessagesTool] | None) -> list[dict[str, Any]] | None:
    found = []
    for place, tool in enumerate(tools or ()):
        where = f"tools[{place}]"
        if tool.type not in (None, "custom"):
            raise refused(f"{where}.type", tool.type, "give a tool of your own; this is none here")
        if tool.input_schema is None:
            raise refused(f"{where}.input_schema", None, "it must be the schema of an object")
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        found.append({"type": "function", "function": function})
    return found or None


def _tool_choice(chosen: MessagesToolChoice | None) -> Any:
    if chosen is None:
        return None
    if (chosen.name is None) == (chosen.type == "tool"):
        raise refused("tool_choice.name", chosen.name, "a choice of type 'tool' has one, no other")
    if chosen.type == "tool":
        return {"type": "function", "function": {"name": chosen.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[chosen.type]


def _template_kwargs(fields: PromptFields) -> dict[str, Any] | None:
    """The variables of the template. Those that it does not know have no effect."""
    given = dict(fields.chat_template_kwargs or {})
    thinking, config = fields.thinking, fields.output_config
    if thinking is not None:
        budget, is_enabled = thinking.budget_tokens, thinking.type == "enabled"
        if (budget is not None) != is_enabled or (budget or _LEAST_BUDGET) < _LEAST_BUDGET:
            why = f"thinking of type 'enabled' has one, of {_LEAST_BUDGET} or more, and no other"
            raise refused("thinking.budget_tokens", budget, why)
        for name in ("enable_thinking", "thinking"):  # templates have either
            given.setdefault(name, thinking.type != "disabled")
    if config is not None and config.effort is not None:
        given.setdefault("reasoning_effort", config.effort)
    return given or None


def in_its_words(error: ValidationError) -> ValidationError:
    """Rename the fields in an error of the chat request."""
    return renamed(error, _names(error.parameter or ""))


def _names(parameter: str) -> dict[str, str]:
    names = {
        "stop": "stop_sequences",
        "response_format.json_schema.schema": "output_config.format.schema",
        "response_format": "output_config.format",
    }
    if parameter.startswith("tools["):
        tool, _, _ = parameter.partition(".")
        names |= {
            f"{tool}.function.name": f"{tool}.name",
            f"{tool}.function.strict": f"{tool}.strict",
            f"{tool}.function.parameters": f"{tool}.input_schema",
        }
    return names

"""What all requests to an engine that pools have in common."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self

import msgspec

from jaxllm.errors import ValidationError, refused
from jaxllm.frontend.pooling_length import TextOptions, TextPair
from jaxllm.frontend.prompt_length import PromptLength
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.errors import AnswerError, NotFoundError
from jaxllm.openai.fields import REQUEST_ID_IN_WORDS, is_request_id, read_fields
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.wording import renamed
from jaxllm.outputs import PoolingOutput, PoolingRequestOutput
from jaxllm.pooler_config import Pooling
from jaxllm.pooling_params import PoolingParams, PoolingTask
from jaxllm.prompts import PromptType, TextPrompt, TokensPrompt

MAX_INPUTS = 2048  # as OpenAI's API has it

Outputs = Sequence[PoolingRequestOutput[PoolingOutput | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the engine does for a request, and how its outputs become the answer."""

    prompts: list[PromptType | TextPair]
    task: PoolingTask | None
    params: PoolingParams
    options: TextOptions
    # Makes the answer of an id, the time, and the outputs of the prompts; raises AnswerError.
    answer: Callable[[str, int, Outputs], msgspec.Struct]


class PoolingRequest(Protocol):
    """A request of any kind."""

    @property
    def model(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def request_id(self) -> str | None: ...

    @classmethod
    def read(cls, body: object) -> Self:
        """Make a request of a decoded body; raise ValidationError if it is invalid."""
        ...

    @property
    def num_prompts(self) -> int:
        """How many prompts it is at most."""
        ...

    @property
    def conversation(self) -> ChatRequest | None:
        """The request whose template makes the prompt; None if no template does."""
        ...

    def work(self, served: ServedModel) -> Work: ...

    def in_its_words(self, error: ValidationError, place: int | None = None) -> ValidationError:
        """Rename the fields in an engine's error to their names in the request."""
        ...


class PoolingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields that all requests share. None, like JSON's null, means the model's default."""

    model: str | None = None
    user: Any = None  # without effect
    use_activation: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None

    @classmethod
    def read(cls, body: object) -> Self:
        if isinstance(body, dict) and "normalize" in body:
            raise refused("normalize", body["normalize"], "it is now called 'use_activation'")
        request = read_fields(body, cls)
        if request.request_id is not None and not is_request_id(request.request_id):
            raise refused("request_id", request.request_id, f"it must be {REQUEST_ID_IN_WORDS}")
        return request

    @property
    def conversation(self) -> ChatRequest | None:
        return None

    @property
    def options(self) -> TextOptions:
        return TextOptions(
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "right",
            add_special_tokens=self.add_special_tokens is not False,
        )

    def in_its_words(self, error: ValidationError, place: int | None = None) -> ValidationError:
        return renamed(error, self.names_of_fields(place))

    def names_of_fields(self, place: int | None) -> dict[str, str]:
        """Engine parameter -> field of this kind of request, where the names differ."""
        return {}


class InputFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """Requests with inputs of their own: texts, token ids, or a conversation."""

    input: Any = None  # one or several, each a string or a list of token ids
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_name: str | None = None  # whose words are put before every text

    @property
    def num_prompts(self) -> int:
        return len(self._given)

    @property
    def conversation(self) -> ChatRequest | None:
        if self.messages is None:
            return None
        return ChatRequest(
            messages=self.messages,
            add_generation_prompt=bool(self.add_generation_prompt),
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def prompts(self, served: ServedModel) -> list[PromptType | TextPair]:
        """Return the prompts of the request."""
        if (self.input is None) == (self.messages is None):
            raise refused("input", self.input, "give either input or messages")
        if (chat := self.conversation) is not None:
            length = PromptLength(served.max_model_len, num_generated=0)
            prompt = chat.prompt(served, length)
            if self.cache_salt is not None:
                prompt["cache_salt"] = self.cache_salt
            return [prompt]
        given = self._given
        if not 0 < len(given) <= MAX_INPUTS:
            raise refused("input", f"{len(given)} inputs", f"give from 1 to {MAX_INPUTS}")
        before = words_before(pooling_of(served), self.prompt_name)
        return [self._prompt(place, one, before) for place, one in enumerate(given)]

    def names_of_fields(self, place: int | None) -> dict[str, str]:
        name = "messages" if self.messages is not None else "input"
        if place is not None and self._has_several:
            name = f"input[{place}]"
        return {"prompt": name, "prompt_token_ids": name}

    def _prompt(self, place: int, given: object, before: str) -> PromptType:
        prompt: TextPrompt | TokensPrompt
        if isinstance(given, str):
            prompt = TextPrompt(prompt=before + given)
        elif isinstance(given, list) and not before:
            prompt = TokensPrompt(prompt_token_ids=given)
        else:
            why = "it must be a string" + ("" if before else " or a list of token ids")
            raise refused(self.names_of_fields(place)["prompt"], given, why)
        if self.cache_salt is not None:
            prompt["cache_salt"] = self.cache_salt
        return prompt

    @property
    def _given(self) -> list[Any]:
        return self.input if self._has_several else [self.input]

    @property
    def _has_several(self) -> bool:
        given = self.input
        return isinstance(given, list) and (not given or isinstance(given[0], str | list))


class PoolingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, outputs: Outputs) -> "PoolingUsage":
        num = sum(len(output.prompt_token_ids) for output in outputs)
        return cls(prompt_tokens=num, total_tokens=num)


def pooling_of(served: ServedModel) -> Pooling:
    """How the served model pools; raise NotFoundError if it generates."""
    if served.pooling is None:
        raise NotFoundError(
            "this is not served here: the engine generates; start one with --runner pooling, or "
            "with a model that pools",
            parameter="url",
        )
    return served.pooling


def words_before(pooling: Pooling, name: str | None) -> str:
    """What the model's files say to put before a text, by the name of its purpose."""
    if name is None:
        return ""
    known = dict(pooling.prompts)
    if name not in known:
        names = ", ".join(map(repr, known)) or "none"
        raise refused("prompt_name", name, f"the model's files name {names}")
    return known[name]


def data_of(output: PoolingRequestOutput[PoolingOutput | None]) -> Any:
    """The vectors of an output; raise AnswerError if the engine could not finish it."""
    if output.outputs is None:
        raise AnswerError(f"the engine could not finish the answer: {output.error}")
    return output.outputs.data

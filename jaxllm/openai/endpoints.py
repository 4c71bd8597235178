"""The paths that are served, and what their requests have in common."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, Self

from msgspec import Struct

from jaxllm.errors import ValidationError
from jaxllm.openai.answer import Usage
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.chat_answer import answer_chat
from jaxllm.openai.chat_stream import ChatStream
from jaxllm.openai.completion_answer import answer_completion
from jaxllm.openai.completion_stream import CompletionStream
from jaxllm.openai.completions import CompletionRequest
from jaxllm.openai.errors import NotFoundError
from jaxllm.openai.served_model import ServedModel
from jaxllm.outputs import RequestOutput
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import SamplingParams


class Answer(Protocol):
    """The body of an answer."""

    @property
    def usage(self) -> Usage: ...


class Request(Protocol):
    """A request of any kind: one or several prompts that share their parameters."""

    @property
    def model(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def n(self) -> int | None: ...
    @property
    def truncate_prompt_tokens(self) -> int | None: ...
    @property
    def stream(self) -> bool | None: ...

    @classmethod
    def read(cls, body: object, *, live: bool = False) -> Self:
        """Make a request of a decoded body; raises ValidationError."""
        ...

    @property
    def num_prompts(self) -> int: ...

    @property
    def num_prompt_copies(self) -> int:
        """How often the answer shows each prompt, as tokens, as text or by its logprobs."""
        ...

    def prompts(self, served: ServedModel) -> list[PromptType]: ...

    def sampling_params(self, served: ServedModel) -> SamplingParams: ...

    def in_its_words(self, error: ValidationError, place: int | None = None) -> ValidationError:
        """An error of the engine about one of the prompts, under the names of the request."""
        ...


class StreamedAnswer(Protocol):
    """Makes the chunks of an answer of its outputs, which are deltas."""

    def take(self, place: int, output: RequestOutput) -> Sequence[Struct]:
        """The chunks of an output for the prompt of this place; raises AnswerError."""
        ...

    def end(self) -> Sequence[Struct]:
        """What comes after all outputs."""
        ...


class Endpoint(NamedTuple):
    """What is asked at a path, and the two ways to answer it."""

    request: type[Request]
    # From the last outputs of all prompts; raises AnswerError.
    answer: Callable[[Any, str, int, Sequence[RequestOutput], ServedModel], Answer]
    # As it comes.
    stream: Callable[[Any, str, int, ServedModel], StreamedAnswer]


ENDPOINTS = {
    "/v1/chat/completions": Endpoint(ChatRequest, answer_chat, ChatStream),
    "/v1/completions": Endpoint(CompletionRequest, answer_completion, CompletionStream),
}


def find_endpoint(path: str) -> Endpoint:
    """The endpoint at a path; raises NotFoundError."""
    endpoint = ENDPOINTS.get(path)
    if endpoint is None:
        raise NotFoundError(
            f"url={path!r:.80} is not served here; use {' or '.join(ENDPOINTS)}", parameter="url"
        )
    return endpoint

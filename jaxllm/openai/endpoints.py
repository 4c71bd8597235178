"""The paths that are served, and what their requests have in common."""

from collections.abc import Sequence
from typing import Protocol, Self

from msgspec import Struct

from jaxllm.errors import ValidationError
from jaxllm.messages import PromptType, RequestOutput
from jaxllm.openai.answer import Usage
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.completions import CompletionRequest
from jaxllm.openai.errors import NotFoundError
from jaxllm.openai.served_model import ServedModel
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

    def needs_special_tokens(self, served: ServedModel) -> bool: ...

    def answer(
        self, answer_id: str, created: int, outputs: Sequence[RequestOutput], served: ServedModel
    ) -> Answer:
        """The answer from the last outputs of all prompts; raises AnswerError."""
        ...

    def streamed_answer(
        self, answer_id: str, created: int, served: ServedModel
    ) -> "StreamedAnswer":
        """The answer as it comes."""
        ...


class StreamedAnswer(Protocol):
    """Makes the chunks of an answer of its outputs, which are deltas."""

    def take(self, place: int, output: RequestOutput) -> Sequence[Struct]:
        """The chunks of an output for the prompt of this place; raises AnswerError."""
        ...

    def end(self) -> Sequence[Struct]:
        """What comes after all outputs."""
        ...


ENDPOINTS: dict[str, type[Request]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
}


def read_request(path: str, body: object) -> Request:
    """Make a request of the body that was sent to a path; raises ValidationError."""
    kind = ENDPOINTS.get(path)
    if kind is None:
        raise NotFoundError(
            f"url={path!r:.80} is not served here; use {' or '.join(ENDPOINTS)}", parameter="url"
        )
    return kind.read(body)

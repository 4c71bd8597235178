"""The served paths, and the interfaces that their requests and answers share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

from msgspec import Struct

from jaxllm.errors import ValidationError
from jaxllm.openai.chat import ChatRequest
from jaxllm.openai.chat_answer import answer_chat
from jaxllm.openai.chat_stream import ChatStream
from jaxllm.openai.completion_answer import answer_completion
from jaxllm.openai.completion_stream import CompletionStream
from jaxllm.openai.completions import CompletionRequest
from jaxllm.openai.errors import ErrorBody, NotFoundError
from jaxllm.openai.served_model import ServedModel
from jaxllm.openai.wire import OPENAI, Wire
from jaxllm.outputs import RequestOutput
from jaxllm.parsers.reasoning.base import Reasoning
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import BeamSearchParams, SamplingParams


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
    @property
    def is_background(self) -> bool:
        """Whether the client does not wait for the answer, and reads it later."""
        ...

    @property
    def conversation(self) -> ChatRequest | None:
        """The request whose chat template makes the prompt; None if no template does."""
        ...

    @classmethod
    def read(cls, body: object, *, live: bool = False) -> Self:
        """Make a request of a decoded body; raise ValidationError if it is invalid."""
        ...

    @property
    def num_prompts(self) -> int: ...

    @property
    def num_prompt_copies(self) -> int:
        """How often the answer contains each prompt, as tokens, as text or by its logprobs."""
        ...

    def prompts(self, served: ServedModel) -> list[PromptType]: ...

    def sampling_params(self, served: ServedModel) -> SamplingParams: ...

    def reasoning(self, served: ServedModel) -> Reasoning | None:
        """What may come before the form of the answers, if they have one."""
        ...

    def beam_search(self, params: SamplingParams, served: ServedModel) -> BeamSearchParams | None:
        """The parameters of a beam search, if the request wants one."""
        ...

    def id_of(self, answer_id: str) -> str:
        """The id in the body of the answer with this id."""
        ...

    def in_its_words(self, error: ValidationError, place: int | None = None) -> ValidationError:
        """Rename the fields in an engine's error to their names in the request."""
        ...


class Reader(Protocol):
    """Makes requests of decoded bodies, as the types of requests do."""

    def read(self, body: object, *, live: bool = False) -> Request: ...


class StreamedAnswer(Protocol):
    """Makes the chunks of an answer from output deltas."""

    def take(self, place: int, output: RequestOutput) -> Sequence[Struct]:
        """Make the chunks of an output for the prompt at this index; raise AnswerError."""
        ...

    def end(self) -> Sequence[Struct]:
        """Make the chunks after all outputs."""
        ...

    def fail(self, error: ErrorBody) -> Sequence[Struct]:
        """Make the chunks that end a stream with an error."""
        ...


class Background(NamedTuple):
    """How an answer begins and fails for which no client waits."""

    # Keeps and returns a body without the answer, of the request, the time and the model.
    begin: Callable[[Any, int, ServedModel], Struct]
    # Keeps the reason, with these and the error.
    fail: Callable[[Any, int, ServedModel, ErrorBody], None]


class Endpoint(NamedTuple):
    """The request type of a path, and the two ways to answer it."""

    request: Reader
    # Makes the whole answer from the final outputs of all prompts; raises AnswerError.
    answer: Callable[[Any, str, int, Sequence[RequestOutput], ServedModel], Struct]
    # Makes a streamed answer.
    stream: Callable[[Any, str, int, ServedModel], StreamedAnswer]
    wire: Wire = OPENAI
    background: Background | None = None


CHAT = Endpoint(ChatRequest, answer_chat, ChatStream)
COMPLETIONS = Endpoint(CompletionRequest, answer_completion, CompletionStream)
ENDPOINTS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETIONS}


def find_endpoint(path: str) -> Endpoint:
    """Return the endpoint of a path; raise NotFoundError."""
    return find_in(ENDPOINTS, path)


def find_in(endpoints: Mapping[str, Endpoint], path: str) -> Endpoint:
    """Likewise of these."""
    endpoint = endpoints.get(path)
    if endpoint is None:
        raise NotFoundError(
            f"url={path!r:.80} is not served here; use {' or '.join(endpoints)}", parameter="url"
        )
    return endpoint

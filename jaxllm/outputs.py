"""What a user gets: the answers to a prompt, as far as they are known. The names are vLLM's."""

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from jaxllm.lora.request import LoRARequest


class Logprob(msgspec.Struct, gc=False):
    """The log probability of a token at one position. There may be very many, so the garbage
    collector does not track them."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class RequestStateStats:
    """Times of a request: arrival on time.time(), the others on time.monotonic()."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # seconds from arrival to the first token
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    is_corrupted: bool = False  # an answer ended because its logits were not finite
    replica: int = 0  # the replica that served it; 0 if it ended before its first token


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    # 'stop', 'length', 'abort' or 'error': the step that was computing it has failed, or all of the
    # engine. Then it has the tokens from before, and `stop_reason` says why.
    finish_reason: str | None = None
    # Of 'stop': the stop string, or the token of stop_token_ids; None for the end of the sequence.
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def extend(self, delta: "CompletionOutput") -> None:
        """Append a delta."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if self.logprobs is not None:
            self.logprobs += delta.logprobs or ()
        self.cumulative_logprob = delta.cumulative_logprob
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """The answers to one prompt, as far as they are known."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    num_cached_tokens: int | None = None
    lora_request: LoRARequest | None = None
    # For another engine, which takes the blocks of the prompt over.
    kv_transfer_params: dict[str, Any] | None = None
    # vLLM's names for what we do not have yet.
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None

    def add(self, next_output: "RequestOutput", aggregate: bool) -> None:
        """Take in a later output of the same request. With `aggregate` it is a delta, which is
        appended; otherwise it replaces the answers here."""
        self.finished |= next_output.finished
        self.kv_transfer_params = next_output.kv_transfer_params
        mine = {answer.index: i for i, answer in enumerate(self.outputs)}
        for answer in next_output.outputs:
            place = mine.get(answer.index)
            if place is None:
                self.outputs.append(answer)
            elif aggregate:
                self.outputs[place].extend(answer)
            else:
                self.outputs[place] = answer


@dataclass(slots=True)
class PoolingOutput:
    """What was pooled: one vector, f32 [K], or one for each token of the prompt, [tokens, K]."""

    data: np.ndarray


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector that stands for the prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probabilities of the classes."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


Pooled = TypeVar("Pooled")


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Pooled]):
    """What was pooled of one prompt. `outputs` is None if the request ended with an error or was
    aborted, which `error` says."""

    request_id: str
    outputs: Pooled
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    metrics: RequestStateStats | None = None
    error: str | None = None


AnyOutput = RequestOutput | PoolingRequestOutput[PoolingOutput | None]
EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: `tokens` includes the prompt."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best beams of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)

"""A pooling request as its vectors arrive, and what the user gets of them."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxllm.errors import refused
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.frontend.many_prompts import as_prompts
from jaxllm.messages import EngineOutput, FinishReason
from jaxllm.metrics.finished_request import FinishedRequest
from jaxllm.outputs import PoolingOutput, PoolingRequestOutput, RequestStateStats
from jaxllm.pooler_config import Pooling
from jaxllm.pooling_params import PoolingParams
from jaxllm.prompts import PromptType
from jaxllm.sampling_params import RequestOutputKind


class PooledRequest:
    """A user's request, which is its only answer, too."""

    kind = RequestOutputKind.FINAL_ONLY

    def __init__(
        self,
        processed: ProcessedInput,
        pooling: Pooling,
        on_finish: Callable[[PoolingRequestOutput], None] | None,
    ):
        assert isinstance(processed.params, PoolingParams), processed.params
        self.params = processed.params
        self.request_id = processed.request_id
        self.engine_id = processed.requests[0].request_id
        self.prompt_token_ids = processed.prompt_token_ids
        self.request, self.answers = self, [self]
        self.num_running = 1
        self.finish_reason: FinishReason | None = None
        self.num_cached_tokens = 0
        self.metrics = RequestStateStats(arrival_time=processed.requests[0].arrival_time)
        self._pooling = pooling
        self._on_finish = on_finish
        self._trace_headers = processed.trace_headers
        self._vectors: list[bytes] = []
        self._error: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.num_running == 0

    @property
    def has_news(self) -> bool:
        return self.finish_reason is not None

    def take(self, out: EngineOutput) -> int:
        """Take an output. None of its tokens was generated."""
        if out.new_vectors is not None:
            self._vectors.append(out.new_vectors)
        if out.finish_reason is not None:
            self.finish_reason = out.finish_reason
            if out.finish_reason is FinishReason.ERROR:
                self._error = out.error
        return 0

    def account(self, answer: "PooledRequest", out: EngineOutput, num_new: int, now: float) -> None:
        """Note everything in an output but its vectors."""
        self.num_cached_tokens = self.num_cached_tokens or out.num_cached_tokens
        if (stats := out.stats) is not None:
            for name in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"):
                setattr(self.metrics, name, getattr(stats, name))
            self.metrics.num_preemptions = stats.num_preemptions
            self.metrics.is_corrupted = stats.is_corrupted
            self.metrics.replica = stats.replica

    def abort(self) -> None:
        self.finish_reason = FinishReason.ABORT
        self._error = "the request was aborted"

    def finish(self) -> PoolingRequestOutput:
        """Make the output, and call `on_finish` with it."""
        output = self.make_output()
        if self._on_finish is not None:
            self._on_finish(output)
        return output

    def make_output(self) -> PoolingRequestOutput:
        data = None
        if self._error is None:
            vectors = np.frombuffer(b"".join(self._vectors), "<f4")
            vectors = vectors.reshape(-1, self._pooling.size)
            if self.params.task in ("embed", "classify"):
                (vectors,) = vectors
            elif self._pooling.tok_pooling == "STEP":
                vectors = self._at_steps(vectors)
            # Of probabilities those that are wanted: alone they would all be 1.
            if self._pooling.is_embedding:
                data = finished(self._columns(vectors), self._pooling, self.params)
            else:
                data = self._columns(finished(vectors, self._pooling, self.params))
            data = PoolingOutput(data)
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=data,
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=self.num_cached_tokens,
            finished=self.is_finished,
            metrics=self.metrics,
            error=self._error,
        )

    def _at_steps(self, vectors: np.ndarray) -> np.ndarray:
        """Of the vectors of all tokens those at the ends of steps."""
        tag = self.params.step_tag_id
        tag = self._pooling.step_tag_id if tag is None else tag
        return vectors if tag is None else vectors[np.array(self.prompt_token_ids) == tag]

    def _columns(self, vectors: np.ndarray) -> np.ndarray:
        """The wanted numbers of vectors at the ends of steps."""
        wanted = self.params.returned_token_ids
        wanted = self._pooling.returned_token_ids if wanted is None else wanted
        if wanted is None or self.params.task in ("embed", "classify"):
            return vectors
        return vectors[:, self._pooling.columns(wanted)]

    def finished(self) -> FinishedRequest:
        """The record of the finished request for metrics and traces."""
        return FinishedRequest(
            request_id=self.request_id,
            params=self.params,
            trace_headers=self._trace_headers,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_generation_tokens=[0],
            finish_reasons=[str(self.finish_reason)],
            errors=[str(self._error)] if self.finish_reason is FinishReason.ERROR else [],
            times=self.metrics,
            end_time=time.time(),
        )


def finished(vectors: np.ndarray, pooling: Pooling, params: PoolingParams) -> np.ndarray:
    """Cut embeddings and give them the length 1; make probabilities of the scores of classes. The
    vectors, f32, are along the last axis."""
    if params.dimensions is not None:
        vectors = vectors[..., : params.dimensions]  # first, so that the length is that of the rest
    if not params.use_activation:
        return vectors
    match pooling.activation:
        case "normalize":
            length = np.sqrt(np.square(vectors).sum(-1, keepdims=True))
            return vectors / np.maximum(length, np.float32(1e-12))
        case "softmax":
            powers = np.exp(vectors - vectors.max(-1, keepdims=True))
            return powers / powers.sum(-1, keepdims=True)
        case "sigmoid":
            return np.reciprocal(np.float32(1) + np.exp(-vectors))
        case "none":
            return vectors


def converted(output: PoolingRequestOutput, convert: Callable[[np.ndarray], Any]) -> Any:
    """The output with its vector in another form; that of a request without one stays."""
    data = output.outputs
    return dataclasses.replace(output, outputs=None if data is None else convert(data.data))


def named_prompts(
    pooling: Pooling, name: str | None, prompts: PromptType | Sequence[PromptType]
) -> Sequence[PromptType]:
    """The prompts, each with the model's own words for a purpose before its text."""
    several = as_prompts(prompts)
    if name is None:
        return several
    known = dict(pooling.prompts)
    if name not in known:
        names = ", ".join(map(repr, known)) or "there are none"
        raise refused("prompt_name", name, f"the model's files name: {names}")
    if not all(isinstance(prompt, str) for prompt in several):
        raise refused("prompt_name", name, "words can be put before texts only; give strings")
    return [known[name] + str(prompt) for prompt in several]

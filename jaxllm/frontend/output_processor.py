"""What the engine core brought becomes what the user gets: text, stop strings, logprobs,
RequestOutputs.

This is the frontend's only loop over requests: per token one pass through
detokenise -> stop strings -> logprobs, whose cost does not depend on the length of the answer. What
is built per RequestOutput depends on the output kind: DELTA costs what is new, FINAL_ONLY hands
over the lists it gathered without copying them, CUMULATIVE has to copy all so far.
"""

import io
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from jaxllm.errors import ValidationError
from jaxllm.frontend.detokenizer import Detokenizer, IncrementalDetokenizer
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.frontend.logprobs import logprobs_by_token
from jaxllm.frontend.stop_strings import StopStrings
from jaxllm.frontend.tokenizer import Tokenizer
from jaxllm.messages import EngineOutput, FinishReason, RequestStats
from jaxllm.metrics.finished_request import FinishedRequest
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


class ProcessedOutputs(NamedTuple):
    """What one batch of engine outputs amounts to."""

    request_outputs: list[RequestOutput]
    abort_ids: list[str]  # engine requests that a stop string ended: the engine must be told


class OutputProcessor:
    """All unfinished requests of one frontend. A request with n > 1 is n requests of the engine;
    their outputs gather here under the id that the user gave."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        on_end: Callable[[FinishedRequest], None] = lambda request: None,
    ):
        """Every request that ends is told to `on_end`."""
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer
        self._on_end = on_end
        self._requests: dict[str, _Request] = {}
        self._answers: dict[str, _Answer] = {}  # by the engine's request id; unfinished only

    def is_known(self, request_id: str) -> bool:
        """Whether an unfinished request has this id."""
        return request_id in self._requests

    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def add_request(
        self,
        processed: ProcessedInput,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> None:
        """Expect the outputs of a request; a duplicate id is refused and changes nothing. Its last
        output also goes to `on_finish`."""
        request_id = processed.request_id
        engine_ids = [request.request_id for request in processed.requests]
        if request_id in self._requests or any(id in self._answers for id in engine_ids):
            raise ValidationError(
                f"request_id={request_id!r} is already in use by an unfinished request",
                parameter="request_id",
                value=request_id,
            )
        request = _Request(processed, self._detokenizer, on_finish)
        self._requests[request_id] = request
        self._answers.update(zip(engine_ids, request.answers, strict=True))

    def process(self, outputs: list[EngineOutput]) -> ProcessedOutputs:
        """Take what a step brought. Outputs of requests that have ended are dropped."""
        now = time.time()
        abort_ids: list[str] = []
        touched: dict[str, _Request] = {}
        for out in outputs:
            answer = self._answers.get(out.request_id)
            if answer is None:
                continue
            request = answer.request
            num_new = answer.take(out)
            request.account(answer, out, num_new, now)
            if answer.finish_reason is not None:
                del self._answers[out.request_id]
                request.num_running -= 1
                if out.finish_reason is None:
                    abort_ids.append(out.request_id)
            if answer.has_news:
                touched[request.request_id] = request
        request_outputs = []
        for request in touched.values():
            if request.is_finished:
                del self._requests[request.request_id]
                request_outputs.append(request.finish())
                self._on_end(request.finished())
            elif request.kind is not RequestOutputKind.FINAL_ONLY:
                request_outputs.append(request.make_output())
        return ProcessedOutputs(request_outputs, abort_ids)

    def abort(self, request_id: str) -> list[str]:
        """Forget a request, and return the ids of its engine requests that still run. Nothing
        more comes of it but the call of its `on_finish`; unknown and finished ones give an empty
        list."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return []
        running = [answer for answer in request.answers if answer.finish_reason is None]
        for answer in running:
            del self._answers[answer.engine_id]
            answer.abort()
        request.num_running = 0
        request.finish()
        self._on_end(request.finished())
        return [answer.engine_id for answer in running]


class _Request:
    """What the user asked for, and its n answers."""

    def __init__(
        self,
        processed: ProcessedInput,
        detokenizer: Detokenizer | None,
        on_finish: Callable[[RequestOutput], None] | None,
    ):
        self.params = params = processed.params
        self._trace_headers = processed.trace_headers
        self._on_finish = on_finish
        self.request_id = processed.request_id
        self.prompt = processed.prompt
        self.prompt_token_ids = processed.prompt_token_ids
        self.kind = params.output_kind
        if not params.detokenize:
            detokenizer = None
        self.token_text = None if detokenizer is None else detokenizer.token_text
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token has none
        self.answers = [
            _Answer(self, i, request.request_id, params, detokenizer)
            for i, request in enumerate(processed.requests)
        ]
        self.num_running = len(self.answers)
        self.num_cached_tokens = 0
        self.metrics = RequestStateStats(arrival_time=processed.requests[0].arrival_time)

    @property
    def is_finished(self) -> bool:
        return self.num_running == 0

    def account(self, answer: "_Answer", out: EngineOutput, num_new: int, now: float) -> None:
        """Note what an output says beside its tokens."""
        metrics = self.metrics
        if num_new and not metrics.num_generation_tokens:
            metrics.first_token_latency = now - metrics.arrival_time
        metrics.num_generation_tokens += num_new
        stats = out.stats
        if answer.finish_reason is not None and out.finish_reason is None:
            # A stop string ended it: the engine's own last word would come too late.
            stats = msgspec.structs.replace(
                stats or answer.stats or RequestStats(), last_token_ts=time.monotonic()
            )
        if stats is not None:
            self.note_stats(answer, stats)
        if answer.index == 0:
            # The others share the first one's prompt blocks; theirs would always be hits.
            if answer.num_tokens == num_new:
                self.num_cached_tokens = out.num_cached_tokens
            if out.new_prompt_logprobs is not None and self.prompt_logprobs is not None:
                self.prompt_logprobs += [
                    logprobs_by_token(position, self.token_text)
                    for position in out.new_prompt_logprobs
                ]

    def note_stats(self, answer: "_Answer", stats: RequestStats) -> None:
        """Take in what is known now of an answer. Costs the same however many answers there are:
        it happens twice in the life of each, and once more for each preemption."""
        metrics, before = self.metrics, answer.stats or RequestStats()
        answer.stats = stats
        metrics.replica = stats.replica  # followers are where their leader is
        metrics.queued_ts = _first(metrics.queued_ts, stats.queued_ts)
        metrics.scheduled_ts = _first(metrics.scheduled_ts, stats.scheduled_ts)
        metrics.first_token_ts = _first(metrics.first_token_ts, stats.first_token_ts)
        metrics.last_token_ts = max(metrics.last_token_ts, stats.last_token_ts)
        metrics.num_preemptions += stats.num_preemptions - before.num_preemptions
        metrics.is_corrupted |= stats.is_corrupted

    def finish(self) -> RequestOutput:
        """Say the last there is to say, to everybody who waits for it."""
        output = self.make_output()
        if self._on_finish is not None:
            self._on_finish(output)
        return output

    def finished(self) -> FinishedRequest:
        """What is to be said of the request when all is over."""
        failed = [one for one in self.answers if one.finish_reason is FinishReason.ERROR]
        return FinishedRequest(
            request_id=self.request_id,
            params=self.params,
            trace_headers=self._trace_headers,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=self.num_cached_tokens,
            num_generation_tokens=[answer.num_tokens for answer in self.answers],
            finish_reasons=[str(answer.finish_reason) for answer in self.answers],
            errors=[str(answer.stop_reason) for answer in failed],
            times=self.metrics,
            end_time=time.time(),
        )

    def make_output(self) -> RequestOutput:
        """Say what there is to say. The metrics are the request's own object, which goes on
        changing until the last output."""
        if self.kind is RequestOutputKind.DELTA:
            outputs = [answer.take_delta() for answer in self.answers if answer.has_news]
            # Once, with the first output.
            prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        else:
            outputs = [answer.so_far() for answer in self.answers]
            prompt_logprobs = self.prompt_logprobs
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=self.is_finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )


class _Answer:
    """One of the n answers of a request: one request of the engine."""

    def __init__(
        self,
        request: _Request,
        index: int,
        engine_id: str,
        params: SamplingParams,
        detokenizer: Detokenizer | None,
    ):
        self.request = request
        self.index = index
        self.engine_id = engine_id
        self.stats: RequestStats | None = None
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.has_news = False
        # All so far; with DELTA, what has not been handed out yet.
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = None
        self._text = io.StringIO()  # appends without copying, and far smaller than many strings
        self._cumulative_logprob: float | None = None
        if params.logprobs is not None:
            self._logprobs, self._cumulative_logprob = [], 0.0
        self._final: CompletionOutput | None = None

        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._stream: IncrementalDetokenizer | None = None
        self._stop: StopStrings | None = None
        if detokenizer is not None:
            self._stream = detokenizer.stream(
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                prompt_token_ids=request.prompt_token_ids,
            )
            if params.stop:
                self._stop = StopStrings(list(params.stop), include=self._include_stop)

    def take(self, out: EngineOutput) -> int:
        """Take an output; return how many of its tokens belong to the answer. Those after the
        token that completed a stop string do not."""
        token_ids = out.new_token_ids
        num_new = len(token_ids)
        if self._stream is not None and token_ids:
            ends_with_stop_token = out.finish_reason is FinishReason.STOP
            hide_last = ends_with_stop_token and not self._include_stop
            shown = token_ids[:-1] if hide_last else token_ids
            if self._stop is None:
                self._text.write(self._stream.append(shown))
            else:
                num_seen = self._take_until_stop(self._stream, self._stop, shown)
                if self._stop.match is not None:
                    num_new = num_seen
                    self.finish_reason, self.stop_reason = FinishReason.STOP, self._stop.match
        if num_new < len(token_ids):
            token_ids = token_ids[:num_new]
        self._token_ids += token_ids
        self.num_tokens += num_new
        if self._logprobs is not None and self._cumulative_logprob is not None and token_ids:
            assert out.new_logprobs is not None, f"{out.request_id}: tokens without logprobs"
            token_text = self.request.token_text
            for position in out.new_logprobs[:num_new]:
                self._logprobs.append(logprobs_by_token(position, token_text))
                self._cumulative_logprob += position.logprobs[0]
        if self.finish_reason is None and out.finish_reason is not None:
            self.finish_reason = out.finish_reason
            is_error = out.finish_reason is FinishReason.ERROR
            self.stop_reason = out.error if is_error else out.stop_reason
            if self._stop is not None:
                self._text.write(self._stop.flush())
        self.has_news = self.has_news or bool(num_new) or self.finish_reason is not None
        return num_new

    def abort(self) -> None:
        """End the answer where it is."""
        self.finish_reason = FinishReason.ABORT
        if self.stats is not None:
            now = time.monotonic()
            self.request.note_stats(self, msgspec.structs.replace(self.stats, last_token_ts=now))
        if self._stop is not None:
            self._text.write(self._stop.flush())
        self.has_news = True

    def _take_until_stop(
        self, stream: IncrementalDetokenizer, stop: StopStrings, token_ids: list[int]
    ) -> int:
        """Return the number of tokens up to the one that completed a stop string, or all."""
        for i, token in enumerate(token_ids, 1):
            may_stop = self.num_tokens + i > self._min_tokens
            self._text.write(stop.push(stream.append((token,)), search=may_stop))
            if stop.match is not None:
                return i
        return len(token_ids)

    def take_delta(self) -> CompletionOutput:
        """Hand out what is new, and keep nothing of it."""
        delta = self._completion(self._token_ids, self._logprobs)
        self._token_ids, self._text = [], io.StringIO()
        self._logprobs = None if self._logprobs is None else []
        self.has_news = False
        return delta

    def so_far(self) -> CompletionOutput:
        """Hand out all: copies while the answer grows, and in the end the lists themselves."""
        if self._final is not None:
            return self._final
        self.has_news = False
        if self.finish_reason is not None:
            self._final = self._completion(self._token_ids, self._logprobs)
            return self._final
        logprobs = None if self._logprobs is None else list(self._logprobs)
        return self._completion(list(self._token_ids), logprobs)

    def _completion(
        self, token_ids: list[int], logprobs: list[dict[int, Logprob]] | None
    ) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self._text.getvalue(),
            token_ids=token_ids,
            cumulative_logprob=self._cumulative_logprob,
            logprobs=logprobs,
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
        )


def _first(one: float, other: float) -> float:
    """The earlier; 0.0, which means not yet, does not count."""
    return min(one, other) if one and other else one or other

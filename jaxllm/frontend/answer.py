"""A request and its answers as they grow: tokens become text, logprobs and RequestOutputs.

The cost of a token does not depend on the length of the answer: each token passes once through
detokenise -> stop strings -> logprobs. The cost of a RequestOutput depends on its kind: DELTA costs
what is new, FINAL_ONLY passes its lists on without a copy, CUMULATIVE copies the answer so far.
"""

import io
import time
from collections.abc import Callable

import msgspec

from jaxllm.frontend.detokenizer import Detokenizer, IncrementalDetokenizer
from jaxllm.frontend.input_processor import ProcessedInput
from jaxllm.frontend.logprobs import logprobs_by_token
from jaxllm.frontend.stop_strings import StopStrings
from jaxllm.messages import EngineOutput, FinishReason, RequestStats
from jaxllm.metrics.finished_request import FinishedRequest
from jaxllm.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from jaxllm.sampling_params import RequestOutputKind, SamplingParams


class OpenRequest:
    """A user's request and its n answers."""

    def __init__(
        self,
        processed: ProcessedInput,
        detokenizer: Detokenizer | None,
        on_finish: Callable[[RequestOutput], None] | None,
    ):
        assert isinstance(processed.params, SamplingParams), processed
        self.params = params = processed.params
        self._trace_headers = processed.trace_headers
        self._on_finish = on_finish
        first = processed.requests[0]
        self.request_id = processed.request_id
        self.lora_request = processed.lora_request
        self._transfer_of = processed.transfer_of
        self.prompt = processed.prompt
        self.prompt_token_ids = processed.prompt_token_ids
        # Those that have a text, after which the answer's goes on.
        self.read_token_ids = [] if first.embeds is not None else processed.prompt_token_ids
        self.kind = params.output_kind
        # The tokens that no text shows at the end; None: whichever is the last of a stop.
        self.stop_ids: frozenset[int] | None = None
        if first.grammar is not None:  # its end is a stop, too, after any token
            self.stop_ids = frozenset([*first.eos_token_ids, *first.stop_token_ids])
        if not params.detokenize:
            detokenizer = None
        self.token_text = None if detokenizer is None else detokenizer.token_text
        self.prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token has none
        self.answers = [
            Answer(self, i, request.request_id, params, detokenizer)
            for i, request in enumerate(processed.requests)
        ]
        self.num_running = len(self.answers)
        self.num_cached_tokens = 0
        self.metrics = RequestStateStats(arrival_time=processed.requests[0].arrival_time)

    @property
    def is_finished(self) -> bool:
        return self.num_running == 0

    def account(self, answer: "Answer", out: EngineOutput, num_new: int, now: float) -> None:
        """Note everything in an output but its tokens and their logprobs."""
        metrics = self.metrics
        if num_new and not metrics.num_generation_tokens:
            metrics.first_token_latency = now - metrics.arrival_time
        metrics.num_generation_tokens += num_new
        stats = out.stats
        if answer.finish_reason is not None and out.finish_reason is None:
            # A stop string ended the answer: the engine's last stats would come too late.
            stats = msgspec.structs.replace(
                stats or answer.stats or RequestStats(), last_token_ts=time.monotonic()
            )
        if stats is not None:
            self.note_stats(answer, stats)
        if answer.index == 0:
            # The other answers share the first one's prompt blocks, so theirs are always hits.
            if answer.num_tokens == num_new:
                self.num_cached_tokens = out.num_cached_tokens
            if out.new_prompt_logprobs is not None and self.prompt_logprobs is not None:
                self.prompt_logprobs += [
                    logprobs_by_token(position, self.token_text)
                    for position in out.new_prompt_logprobs
                ]

    def note_stats(self, answer: "Answer", stats: RequestStats) -> None:
        """Take in the newest stats of an answer. The engine sends them with the first and the last
        output, and once after each preemption. The cost does not grow with the number of answers.
        """
        metrics, before = self.metrics, answer.stats or RequestStats()
        answer.stats = stats
        metrics.replica = stats.replica  # all answers of a request are on one replica
        metrics.queued_ts = _first(metrics.queued_ts, stats.queued_ts)
        metrics.scheduled_ts = _first(metrics.scheduled_ts, stats.scheduled_ts)
        metrics.first_token_ts = _first(metrics.first_token_ts, stats.first_token_ts)
        metrics.last_token_ts = max(metrics.last_token_ts, stats.last_token_ts)
        metrics.num_preemptions += stats.num_preemptions - before.num_preemptions
        metrics.is_corrupted |= stats.is_corrupted

    def finish(self) -> RequestOutput:
        """Make the last output, and call `on_finish` with it."""
        output = self.make_output()
        if self._on_finish is not None:
            self._on_finish(output)
        return output

    def finished(self) -> FinishedRequest:
        """The record of the finished request for metrics and traces."""
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
        """Make an output. Its metrics are the request's own object, which changes until the last
        output."""
        if self.kind is RequestOutputKind.DELTA:
            outputs = [answer.take_delta() for answer in self.answers if answer.has_news]
            # Only the first output has them.
            prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        else:
            outputs = [answer.so_far() for answer in self.answers]
            prompt_logprobs = self.prompt_logprobs
        transfer = None
        if self._transfer_of is not None and self.is_finished:
            transfer = self._transfer_of(self.metrics.replica)
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=self.is_finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            lora_request=self.lora_request,
            kv_transfer_params=transfer,
        )


class Answer:
    """One of the n answers of a request: one request of the engine."""

    def __init__(
        self,
        request: OpenRequest,
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
        # All so far; with DELTA, what no output has had yet.
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
                prompt_token_ids=request.read_token_ids,
            )
            if params.stop:
                self._stop = StopStrings(list(params.stop), include=self._include_stop)

    def take(self, out: EngineOutput) -> int:
        """Take an output; return how many of its tokens belong to the answer. Tokens after the one
        that completed a stop string do not."""
        token_ids = out.new_token_ids
        num_new = len(token_ids)
        if self._stream is not None and token_ids:
            ends_with_stop_token = out.finish_reason is FinishReason.STOP and (
                self.request.stop_ids is None or token_ids[-1] in self.request.stop_ids
            )
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
        """End the answer as it is now."""
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
        """Return what is new, and keep no reference to it."""
        delta = self._completion(self._token_ids, self._logprobs)
        self._token_ids, self._text = [], io.StringIO()
        self._logprobs = None if self._logprobs is None else []
        self.has_news = False
        return delta

    def so_far(self) -> CompletionOutput:
        """Return the whole answer so far: copies of the lists while it grows, in the end the lists
        themselves."""
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
            lora_request=self.request.lora_request,
        )


def _first(one: float, other: float) -> float:
    """The earlier time; 0.0 means not yet and does not count."""
    return min(one, other) if one and other else one or other

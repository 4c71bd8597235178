"""/metrics: the engine's figures as of now, and how long requests took, for Prometheus.

Names and meanings are those that vLLM's dashboards know, after a prefix.
"""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest

from jaxllm.messages import RequestOutput
from jaxllm.metrics.stats import EngineStats
from jaxllm.server.summed_metrics import added, report

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_LABELS = ("model_name", "engine")

_GAUGES = {
    "num_requests_running": "Answers in the running batch.",
    "num_requests_waiting": "Answers that wait for a place in it.",
    "kv_cache_usage_perc": "Share of the KV cache's blocks in use; 1 means all.",
}
_COUNTERS = {
    "prompt_tokens": ("num_prompt_tokens", "Tokens of prompts computed, not found in the cache."),
    "generation_tokens": ("num_generation_tokens", "Tokens generated."),
    "num_preemptions": ("num_preemptions", "Answers put back to the queue for want of memory."),
    "prefix_cache_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Tokens found there."),
    "engine_steps": ("num_steps", "Steps of the engine."),
    "engine_step_seconds": ("step_s", "Seconds of the engine's loop in which there was a step."),
    "compiles_after_warmup": ("num_compiles_after_warmup", "Programs compiled late."),
}
_TIMES = {
    "time_to_first_token_seconds": "From the arrival of a request to its first token.",
    "inter_token_latency_seconds": "From token to token: of a streamed answer from piece to piece, "
    "of any other on average.",
    "request_time_per_output_token_seconds": "From token to token, on average over an answer.",
    "e2e_request_latency_seconds": "From the arrival of a request to its end.",
    "request_queue_time_seconds": "Waiting to be scheduled.",
    "request_inference_time_seconds": "From there to the last token.",
    "request_prefill_time_seconds": "From there to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
}
_SIZES = {
    "request_prompt_tokens": "Tokens of a prompt.",
    "request_generation_tokens": "Tokens generated for a prompt.",
    "request_params_n": "Answers wanted to a prompt.",
}


class _Page(NamedTuple):
    """A registry of what has been collected."""

    families: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


class ServerMetrics:
    """Fed with every output of the engine; on the event loop only."""

    def __init__(self, prefix: str, model: str):
        disable_created_metrics()  # a second series for each, of no use to a dashboard
        self._registry = CollectorRegistry(auto_describe=False)
        self._labels = (model, "0")
        self._prefix = prefix
        self._stats = EngineStats()
        self._last_piece: dict[str, float] = {}  # of streamed answers under way
        self._histograms = {
            name: Histogram(
                f"{prefix}:{name}", text, _LABELS, buckets=buckets, registry=self._registry
            ).labels(*self._labels)
            for names, buckets in ((_TIMES, _SECONDS), (_SIZES, _TOKENS))
            for name, text in names.items()
        }
        self._success = Counter(
            f"{prefix}:request_success",
            "Answers that have ended.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        self._refused = Counter(
            f"{prefix}:admission_rejections",
            "Requests that were refused because too many were under way.",
            _LABELS,
            registry=self._registry,
        ).labels(*self._labels)
        self._num_refused = 0

    def observe(self, output: RequestOutput) -> None:
        """Take an output of the engine in."""
        now = time.monotonic()
        if output.finished:
            self._observe_end(output, now)
        elif output.metrics is not None:
            last = self._last_piece.get(output.request_id)
            self._last_piece[output.request_id] = now
            if last is not None:
                self._observe_piece(output, now - last)

    def expose(
        self, stats: EngineStats | None, num_refused: int, reports: Sequence[bytes] = ()
    ) -> bytes:
        """The page, with the reports of other frontends added; without stats of the engine with
        the last ones that were seen."""
        if stats is not None:
            self._stats = stats
        families = added(self._counted(num_refused), reports)
        return generate_latest(_Page([*families, *self._engine_families()]))

    def report(self, num_refused: int) -> bytes:
        """What was counted here, for another frontend's page."""
        return report(self._counted(num_refused))

    def _counted(self, num_refused: int) -> Iterable[Metric]:
        self._refused.inc(num_refused - self._num_refused)
        self._num_refused = num_refused
        return self._registry.collect()

    def _engine_families(self) -> Iterable[Metric]:
        """The figures that the engine keeps itself."""
        stats = self._stats
        values = (stats.num_requests_running, stats.num_requests_waiting, stats.kv_cache_usage)
        for (name, text), value in zip(_GAUGES.items(), values, strict=True):
            gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, (field, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
            counter.add_metric(self._labels, getattr(stats, field))
            yield counter

    def _observe_piece(self, output: RequestOutput, seconds: float) -> None:
        num_tokens = max((len(one.token_ids) for one in output.outputs), default=0)
        for _ in range(num_tokens):
            self._histograms["inter_token_latency_seconds"].observe(seconds / num_tokens)

    def _observe_end(self, output: RequestOutput, now: float) -> None:
        last_piece = self._last_piece.pop(output.request_id, None)
        for one in output.outputs:
            if one.finish_reason is not None:
                self._success.labels(*self._labels, one.finish_reason).inc()
        metrics = output.metrics
        if metrics is None or not metrics.num_generation_tokens:
            return  # it was aborted before it began
        if last_piece is not None:
            self._observe_piece(output, now - last_piece)
        decode = metrics.last_token_ts - metrics.first_token_ts
        per_answer = metrics.num_generation_tokens / len(output.outputs)
        observed: dict[str, float] = {
            "time_to_first_token_seconds": metrics.first_token_latency,
            "e2e_request_latency_seconds": time.time() - metrics.arrival_time,
            "request_prompt_tokens": len(output.prompt_token_ids),
            "request_generation_tokens": metrics.num_generation_tokens,
            "request_params_n": len(output.outputs),
        }
        if metrics.scheduled_ts:
            observed["request_queue_time_seconds"] = metrics.scheduled_ts - metrics.queued_ts
            observed["request_inference_time_seconds"] = (
                metrics.last_token_ts - metrics.scheduled_ts
            )
            observed["request_prefill_time_seconds"] = metrics.first_token_ts - metrics.scheduled_ts
            observed["request_decode_time_seconds"] = decode
            if per_answer > 1:
                mean = decode / (per_answer - 1)
                observed["request_time_per_output_token_seconds"] = mean
                if last_piece is None:
                    observed["inter_token_latency_seconds"] = mean
        for name, value in observed.items():
            self._histograms[name].observe(max(value, 0.0))

"""Counts and histograms of a server's requests, for Prometheus.

All of them only grow, so the values of several frontends of one engine can be added up. The names
after the prefix are vLLM's, for its dashboards.
"""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from jaxllm.frontend.async_llm_engine import AsyncLLMEngine
from jaxllm.metrics.finished_request import FinishedRequest
from jaxllm.outputs import AnyOutput, RequestOutput
from jaxllm.pooling_params import PoolingParams
from jaxllm.sampling_params import RequestOutputKind
from jaxllm.server.histogram import Histogram
from jaxllm.server.summed_metrics import added, report

SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_FEW = (0, 1, 2, 3, 5, 10, 20, 50)
LABELS = ("model_name", "engine")

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
    "request_prefill_kv_computed_tokens": "Those of them that were not found in the cache.",
    "request_generation_tokens": "Tokens generated for a prompt.",
    "request_max_num_generation_tokens": "Tokens of the longest answer to a prompt.",
    "request_params_max_tokens": "Most tokens that a request wanted in an answer, if it said so.",
    "request_params_n": "Answers wanted to a prompt.",
}
_COUNTS = {"request_num_preemptions": "How often a request was put back to the queue."}


class ServerMetrics:
    """Observes every output and every end of a request. Use it only on the event loop."""

    def __init__(self, prefix: str, model: str, num_replicas: int, refused: Mapping[str, int]):
        """`refused` counts refused requests by limit; another object updates it."""
        disable_created_metrics()  # they are a second series for each metric, which is not needed
        self.registry = CollectorRegistry(auto_describe=False)
        self._prefix = prefix
        self._model = model
        self._last_piece: dict[str, float] = {}  # of unfinished streamed answers
        # By replica. prometheus_client's histograms would take a tenth of the time of a token.
        self._histograms = [
            {
                name: Histogram(bounds)
                for names, bounds in ((_TIMES, SECONDS), (_SIZES, _TOKENS), (_COUNTS, _FEW))
                for name in names
            }
            for _ in range(num_replicas)
        ]
        self._success = Counter(
            f"{prefix}:request_success",
            "Answers that have ended.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.registry.register(self)
        self.registry.register(Refusals(prefix, model, refused))

    @contextlib.contextmanager
    def watching(self, engine: AsyncLLMEngine) -> Iterator[None]:
        """Within this context the engine reports outputs and ends."""
        engine.on_output.append(self.observe_output)
        engine.on_end.append(self.observe_end)
        yield
        engine.on_output.remove(self.observe_output)
        engine.on_end.remove(self.observe_end)

    def observe_output(self, output: AnyOutput) -> None:
        """Observe an output. Every output except a request's last one is a piece of a stream."""
        if not isinstance(output, RequestOutput):
            return
        if output.metrics is None or not output.metrics.num_generation_tokens:
            return
        now = time.monotonic()
        last = self._last_piece.get(output.request_id)
        if not output.finished:
            self._last_piece[output.request_id] = now
        if last is not None:
            num_tokens = max((len(one.token_ids) for one in output.outputs), default=0)
            if num_tokens:
                histogram = self._histograms[output.metrics.replica]["inter_token_latency_seconds"]
                histogram.observe((now - last) / num_tokens, num_tokens)

    def observe_end(self, request: FinishedRequest) -> None:
        """Observe the end of a request."""
        self._last_piece.pop(request.request_id, None)
        times, params = request.times, request.params
        for reason in request.finish_reasons:
            self._success.labels(self._model, str(times.replica), reason).inc()
        num_tokens = sum(request.num_generation_tokens)
        if isinstance(params, PoolingParams):
            self._observe_pooling(request)
            return
        if not num_tokens:
            return  # it was aborted before its first token
        observed: dict[str, float] = {
            "time_to_first_token_seconds": times.first_token_latency,
            "e2e_request_latency_seconds": request.e2e_s,
            "request_prompt_tokens": request.num_prompt_tokens,
            "request_prefill_kv_computed_tokens": (
                request.num_prompt_tokens - request.num_cached_tokens
            ),
            "request_generation_tokens": num_tokens,
            "request_max_num_generation_tokens": max(request.num_generation_tokens),
            "request_params_n": params.n,
            "request_num_preemptions": times.num_preemptions,
        }
        if params.max_tokens is not None:
            observed["request_params_max_tokens"] = params.max_tokens
        if times.scheduled_ts:
            observed["request_queue_time_seconds"] = request.queue_s
            observed["request_inference_time_seconds"] = request.inference_s
            observed["request_prefill_time_seconds"] = request.prefill_s
            observed["request_decode_time_seconds"] = request.decode_s
            per_answer = num_tokens / params.n
            if per_answer > 1:
                mean = request.decode_s / (per_answer - 1)
                observed["request_time_per_output_token_seconds"] = mean
                if params.output_kind is RequestOutputKind.FINAL_ONLY:
                    observed["inter_token_latency_seconds"] = mean
        self._note(times.replica, observed)

    def _observe_pooling(self, request: FinishedRequest) -> None:
        if request.times.scheduled_ts:
            self._note(
                request.times.replica,
                {
                    "e2e_request_latency_seconds": request.e2e_s,
                    "request_prompt_tokens": request.num_prompt_tokens,
                    "request_queue_time_seconds": request.queue_s,
                    "request_inference_time_seconds": request.inference_s,
                },
            )

    def _note(self, replica: int, observed: dict[str, float]) -> None:
        for name, value in observed.items():
            self._histograms[replica][name].observe(max(value, 0.0))

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics; the registry calls this."""
        for name, text in (_TIMES | _SIZES | _COUNTS).items():
            family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=LABELS)
            for replica, histograms in enumerate(self._histograms):
                one = histograms[name]
                family.add_metric((self._model, str(replica)), one.buckets(), one.sum)
            yield family

    def expose(self, of_engine: Sequence[Metric], reports: Sequence[bytes] = ()) -> bytes:
        """Format the page: the engine's metrics, which the caller has just read, and the server's,
        with the reports of other frontends added."""
        return page([*of_engine, *added(self.registry.collect(), reports)])

    def report(self) -> bytes:
        """Encode this frontend's counts for another frontend's page."""
        return report(self.registry.collect())


class Refusals(Collector):
    """Exports the counts of an `Admission`, which another object updates."""

    def __init__(self, prefix: str, model: str, refused: Mapping[str, int]):
        self._prefix, self._model, self._refused = prefix, model, refused

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            f"{self._prefix}:admission_rejections",
            "Requests that were refused because too many were under way.",
            labels=("model_name", "reason"),
        )
        for reason, num in self._refused.items():
            family.add_metric((self._model, reason), num)
        yield family


def page(families: Iterable[Metric]) -> bytes:
    """Format these metrics. Those of one name become one, with the samples of all."""
    found: dict[str, Metric] = {}
    for family in families:
        known = found.setdefault(family.name, family)
        if known is not family:
            known.samples += family.samples
    return generate_latest(_AsRead(list(found.values())))


class _AsRead(Collector):
    def __init__(self, families: Sequence[Metric]):
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families

"""Traces for OpenTelemetry: a span for every request, and for the phases of the start.

A span is made when its request has ended, from times that were noted anyway. A thread of its own
sends spans from a bounded queue: if the collector is down or slow, spans that do not fit are
dropped. Only `shutdown` waits for the collector, and not for long.
"""

import atexit
import logging
import threading
from collections.abc import Sequence
from typing import Literal
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import jaxllm
from jaxllm.logging import init_logger
from jaxllm.metrics.finished_request import FinishedRequest
from jaxllm.metrics.startup import Phase
from jaxllm.sampling_params import SamplingParams

logger = init_logger(__name__)

# How long `shutdown` waits for the collector to take the last spans.
_LAST_SPANS_S = 5.0


def make_exporter(endpoint: str, protocol: Literal["grpc", "http/protobuf"]) -> SpanExporter:
    """Make the exporter that sends spans; raise ModuleNotFoundError if it is not installed."""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter as GRPCExporter,
        )

        return GRPCExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HTTPExporter,
    )

    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return HTTPExporter(endpoint=endpoint)


class RequestTracer:
    """Sends spans of requests to a collector. An error here never reaches a request."""

    def __init__(self, exporter: SpanExporter, endpoint: str, model: str):
        self.model = model  # as requests call it
        self._exporter = _QuietExporter(exporter, endpoint)
        resource = Resource.create({"service.name": "jaxllm"}).merge(
            OTELResourceDetector().detect()  # OTEL_SERVICE_NAME has precedence
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("jaxllm", jaxllm.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._has_failed = False
        atexit.register(self.shutdown)

    def trace_request(self, request: FinishedRequest) -> None:
        """Make the span of a request that has ended."""
        try:
            self._trace_request(request)
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                logger.exception("a request could not be traced; this is not said again")

    def trace_startup(self, phases: Sequence[Phase], begun: float, ended: float) -> None:
        """Make the spans of the start's phases."""
        root = self._tracer.start_span("Overall Loading", start_time=_ns(begun))
        context = set_span_in_context(root)
        for phase in phases:
            span = self._tracer.start_span(phase.name, context, start_time=_ns(phase.start))
            span.end(_ns(phase.end))
        root.end(_ns(ended))

    def shutdown(self) -> None:
        """Send the last spans, unless the collector takes too long."""
        atexit.unregister(self.shutdown)
        # In a thread, since the provider's own shutdown has no time limit.
        sender = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sender.start()
        sender.join(_LAST_SPANS_S)
        if sender.is_alive():
            self._exporter.shutdown()

    def _trace_request(self, request: FinishedRequest) -> None:
        parent = self._propagator.extract(request.trace_headers or {})
        end = _ns(request.end_time)
        # Users may set the arrival time, even to one after the end.
        start = _ns(min(request.times.arrival_time, request.end_time))
        span = self._tracer.start_span("llm_request", parent, SpanKind.SERVER, start_time=start)
        if span.is_recording():
            span.set_attributes(_attributes(request, self.model))
            if request.errors:
                span.set_status(Status(StatusCode.ERROR, request.errors[0]))
        span.end(end)


def _attributes(request: FinishedRequest, model: str) -> dict[str, str | int | float | list[str]]:
    params, times = request.params, request.times
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.request.id": request.request_id.encode(errors="replace").decode(),
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": sum(request.num_generation_tokens),
        "gen_ai.response.finish_reasons": request.finish_reasons,
        "gen_ai.latency.e2e": request.e2e_s,
    }
    if isinstance(params, SamplingParams):
        attributes["gen_ai.request.n"] = params.n
        attributes["gen_ai.request.temperature"] = params.temperature
        attributes["gen_ai.request.top_p"] = params.top_p
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if times.scheduled_ts:
        attributes |= {
            "gen_ai.latency.time_to_first_token": times.first_token_latency,
            "gen_ai.latency.time_in_queue": request.queue_s,
            "gen_ai.latency.time_in_model_prefill": request.prefill_s,
            "gen_ai.latency.time_in_model_decode": request.decode_s,
            "gen_ai.latency.time_in_model_inference": request.inference_s,
        }
    return attributes


def _ns(seconds: float) -> int:
    return max(int(seconds * 1e9), 0)


class _QuietExporter(SpanExporter):
    """Logs once that the collector is gone, and once that it is back."""

    def __init__(self, exporter: SpanExporter, endpoint: str):
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_down = False
        # An application with its own logging set-up still gets the exporter's own messages.
        logging.getLogger("opentelemetry").addHandler(_complaint)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        _complaint.text = ""
        result = self._exporter.export(spans)
        is_down = result is not SpanExportResult.SUCCESS
        if is_down and not self._is_down:
            logger.warning(
                "traces do not reach %s, and are lost until they do: %s",
                self._endpoint,
                _complaint.text or "no reason is known",
            )
        elif self._is_down and not is_down:
            logger.info("traces reach %s again", self._endpoint)
        self._is_down = is_down
        return result

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True  # an exporter keeps nothing

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _Complaint(logging.Handler):
    """Keeps the first message that was logged. With a handler in place, Python does not write the
    messages to stderr when the application has no logging set-up."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()[:300]


_complaint = _Complaint()

"""Requests become spans, and nothing that goes wrong with these reaches a request."""

import logging
import sys
import threading
import time

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from jaxllm import SamplingParams, ValidationError
from jaxllm.config import EngineArgs
from jaxllm.metrics.finished_request import FinishedRequest
from jaxllm.metrics.otel import RequestTracer, make_exporter
from jaxllm.metrics.startup import Phase
from jaxllm.metrics.tracing import start_tracing
from jaxllm.outputs import RequestStateStats

ARRIVAL = 1_700_000_000.25
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def finished(**fields):
    times = RequestStateStats(
        arrival_time=ARRIVAL,
        queued_ts=100.0,
        scheduled_ts=100.5,
        first_token_ts=101.5,
        last_token_ts=103.5,
        first_token_latency=1.75,
    )
    of_most = dict(
        request_id="r1",
        params=SamplingParams(n=2, temperature=0.5, top_p=0.75, max_tokens=7),
        trace_headers=None,
        num_prompt_tokens=11,
        num_cached_tokens=4,
        num_generation_tokens=[7, 5],
        finish_reasons=["length", "stop"],
        errors=[],
        times=times,
        end_time=ARRIVAL + 4,
    )
    return FinishedRequest(**(of_most | fields))


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def spans_of(exporter):
    """The spans of requests that have ended."""

    def trace(*requests):
        tracer = RequestTracer(exporter, "http://test", "tiny")
        for request in requests:
            tracer.trace_request(request)
        tracer.shutdown()
        return exporter.get_finished_spans()

    return trace


def test_a_request_is_a_span_with_what_is_known_of_it(spans_of):
    [span] = spans_of(finished())
    assert span.name == "llm_request" and span.kind is SpanKind.SERVER and span.parent is None
    assert span.start_time == int(ARRIVAL * 1e9)
    assert span.end_time == int((ARRIVAL + 4) * 1e9)
    assert span.resource.attributes["service.name"] == "jaxllm"
    assert dict(span.attributes) == {
        "gen_ai.request.id": "r1",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.usage.prompt_tokens": 11,
        "gen_ai.usage.completion_tokens": 12,
        "gen_ai.response.finish_reasons": ("length", "stop"),
        "gen_ai.latency.time_to_first_token": 1.75,
        "gen_ai.latency.e2e": 4.0,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_in_model_prefill": 1.0,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 3.0,
    }


def test_the_parent_comes_with_the_request(spans_of):
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
    [span] = spans_of(finished(trace_headers=headers))
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == SPAN
    assert span.context.trace_state["vendor"] == "1"


def test_who_does_not_sample_gets_no_span(spans_of):
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
    assert spans_of(finished(trace_headers=headers)) == ()


@pytest.mark.parametrize(
    "parent", ["", "nonsense", f"00-{'0' * 32}-{SPAN}-01", f"ff-{TRACE}-{SPAN}-01", "00-é-1-1"]
)
def test_a_broken_parent_is_none(spans_of, parent):
    [span] = spans_of(finished(trace_headers={"traceparent": parent}))
    assert span.parent is None


def test_a_request_that_failed_is_an_error(spans_of):
    [span] = spans_of(finished(finish_reasons=["error", "stop"], errors=["no memory"]))
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "no memory"


def test_a_request_that_never_ran_has_no_times_in_the_engine(spans_of):
    times = RequestStateStats(arrival_time=ARRIVAL)
    request = finished(times=times, num_generation_tokens=[0], finish_reasons=["abort"])
    [span] = spans_of(request)
    names = [name for name in span.attributes if name.startswith("gen_ai.latency")]
    assert names == ["gen_ai.latency.e2e"]
    assert span.attributes["gen_ai.usage.completion_tokens"] == 0


@pytest.mark.parametrize("arrival", [-5.0, ARRIVAL + 1e6, 1e300])
def test_times_that_cannot_be_are_brought_in_order(spans_of, arrival):
    [span] = spans_of(finished(times=RequestStateStats(arrival_time=arrival)))
    assert 0 <= span.start_time <= span.end_time


def test_an_error_is_said_once_and_not_raised(spans_of, exporter, caplog):
    broken = finished(num_generation_tokens=[None])
    spans = spans_of(broken, finished(request_id="\ud800"), broken)
    assert [span.attributes["gen_ai.request.id"] for span in spans] == ["?"]
    said = [one for one in caplog.records if "could not be traced" in one.message]
    assert len(said) == 1


def test_the_start_is_a_trace_of_its_own(exporter):
    tracer = RequestTracer(exporter, "http://test", "tiny")
    tracer.trace_startup([Phase("Load weights", 11.0, 12.5), Phase("Plan", 10.5, 11.0)], 10.0, 13.0)
    tracer.shutdown()
    *parts, whole = exporter.get_finished_spans()
    assert whole.name == "Overall Loading" and whole.parent is None
    assert (whole.start_time, whole.end_time) == (10 * 10**9, 13 * 10**9)
    assert [part.name for part in parts] == ["Load weights", "Plan"]
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    assert parts[0].end_time - parts[0].start_time == 1_500_000_000


class Blocked(SpanExporter):
    """A collector that takes nothing until it is released."""

    def __init__(self):
        self.entered = threading.Event()
        self.released = threading.Event()

    def export(self, spans):
        self.entered.set()
        self.released.wait()
        return SpanExportResult.SUCCESS

    def shutdown(self):
        self.released.set()


def test_a_collector_that_is_stuck_holds_up_nobody(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setattr("jaxllm.metrics.otel._LAST_SPANS_S", 0.01)
    blocked = Blocked()
    tracer = RequestTracer(blocked, "http://test", "tiny")
    tracer.trace_request(finished())
    assert blocked.entered.wait(30)
    for _ in range(3000):  # more than there is room for
        tracer.trace_request(finished())
    assert not blocked.released.is_set()
    tracer.shutdown()  # lets go of it
    assert blocked.released.is_set()


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_that_the_collector_is_down_is_said_once(protocol, monkeypatch, caplog, capfd):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.2")
    endpoint = "http://127.0.0.1:9"
    tracer = RequestTracer(make_exporter(endpoint, protocol), endpoint, "tiny")
    deadline = time.monotonic() + 60
    for _ in range(3):
        tracer.trace_request(finished())
        while not said(caplog) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)  # a second attempt fails, too
    tracer.shutdown()
    [line] = said(caplog)
    assert line.startswith(f"traces do not reach {endpoint}, and are lost until they do: ")
    assert "no reason is known" not in line
    # Servers of other tests, in the same process, log their statistics when it is time.
    records = [one for one in caplog.records if one.name != "jaxllm.server.stats_log"]
    ours = [one for one in records if one.name.startswith("jaxllm")]
    assert len(ours) == 1 and ours[0].levelno == logging.WARNING
    # What the exporter itself says is for those who have set logging up.
    assert "Transient error" not in capfd.readouterr().err


def said(caplog):
    return [one.message for one in caplog.records if "traces do not reach" in one.message]


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [
        ("localhost:4317", "grpc"),
        ("collector", "grpc"),
        ("http://", "grpc"),
        ("grpc://localhost:4317", "http/protobuf"),
        ("file:///tmp/traces", "http/protobuf"),
    ],
)
def test_an_endpoint_that_is_none_is_refused(endpoint, protocol):
    config = EngineArgs("m", otlp_traces_endpoint=endpoint, otlp_traces_protocol=protocol)
    with pytest.raises(ValidationError, match="otlp_traces_endpoint=.*give a URL with a host"):
        start_tracing(config)


@pytest.mark.parametrize(
    ("protocol", "module"),
    [
        ("grpc", "opentelemetry.sdk.trace"),
        ("grpc", "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"),
        ("http/protobuf", "opentelemetry.exporter.otlp.proto.http.trace_exporter"),
    ],
)
def test_what_is_not_installed_is_named_at_the_door(protocol, module, monkeypatch):
    monkeypatch.delitem(sys.modules, "jaxllm.metrics.otel")
    monkeypatch.setitem(sys.modules, module, None)
    config = EngineArgs(
        "m", otlp_traces_endpoint="http://localhost:4317", otlp_traces_protocol=protocol
    )
    with pytest.raises(ValidationError, match=rf"needs {module}; .*'jaxllm\[otel\]'"):
        start_tracing(config)


def test_without_an_endpoint_there_are_no_spans():
    assert start_tracing(EngineArgs("m")) is None


def test_durations_are_never_below_zero():
    request = finished(times=RequestStateStats(arrival_time=ARRIVAL + 1e6, scheduled_ts=5.0))
    assert (request.queue_s, request.prefill_s, request.decode_s) == (5.0, 0.0, 0.0)
    assert request.e2e_s == 0.0

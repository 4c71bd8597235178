"""A collector hears of every request, over both protocols, as part of the caller's trace."""

import contextlib
import http.server
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from jaxllm import LLM, SamplingParams, ValidationError

pytestmark = pytest.mark.slow  # engines are started

BODY = {"prompt": "Once upon", "max_tokens": 6, "ignore_eos": True, "temperature": 0.5}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}


class Collector:
    """What has been sent to it. `endpoint` is where it listens, `protocol` what it speaks."""

    def __init__(self):
        self._received = []

    def take(self, request):
        self._received.append(request)
        return ExportTraceServiceResponse()

    @property
    def spans(self):
        return [
            span
            for request in self._received
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]

    def requests(self):
        """The spans of requests, by request id."""
        spans = [span for span in self.spans if span.name == "llm_request"]
        return {attributes(span)["gen_ai.request.id"]: span for span in spans}

    def services(self):
        return {
            attribute.value.string_value
            for request in self._received
            for of_resource in request.resource_spans
            for attribute in of_resource.resource.attributes
            if attribute.key == "service.name"
        }


def attributes(span):
    """Name -> value."""
    found = {}
    for attribute in span.attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        is_list = kind == "array_value"
        found[attribute.key] = [one.string_value for one in value.values] if is_list else value
    return found


class GRPCCollector(Collector, TraceServiceServicer):
    protocol = "grpc"

    def Export(self, request, context):  # noqa: N802
        return self.take(request)

    @contextlib.contextmanager
    def running(self):
        server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, server)
        self.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield self
        server.stop(0).wait()


class HTTPCollector(Collector):
    protocol = "http/protobuf"

    @contextlib.contextmanager
    def running(self):
        take = self.take

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):  # noqa: N802
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                answer = take(ExportTraceServiceRequest.FromString(body)).SerializeToString()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            yield self
            server.shutdown()
            thread.join()


@pytest.fixture(params=[GRPCCollector, HTTPCollector])
def collector(request):
    with request.param().running() as collector:
        yield collector


def traced(engine_options, collector):
    return engine_options | {
        "otlp_traces_endpoint": collector.endpoint,
        "otlp_traces_protocol": collector.protocol,
    }


def test_requests_of_a_server_are_traced(collector, engine_options, make_host):
    host = make_host(traced(engine_options, collector))
    began = time.time_ns()
    with host.serve(access_log=False) as client:
        assert client.post("/v1/completions", json=BODY, headers=PARENT).status_code == 200
        messages = [{"role": "user", "content": "Hi"}]
        chat = {"messages": messages, "max_tokens": 4, "ignore_eos": True, "stream": True, "n": 2}
        assert client.post("/v1/chat/completions", json=chat, headers=PARENT).status_code == 200
        assert client.post("/v1/completions", json=BODY).status_code == 200
        endless = BODY | {"max_tokens": 2000, "stream": True}
        with client.stream("POST", "/v1/completions", json=endless, headers=PARENT) as stream:
            next(stream.iter_lines())
        assert client.post("/v1/completions", json={"prompt": 1}, headers=PARENT).status_code == 400
        host.wait_until_idle()
    host.call(generate(host.engine, "mine", trace_headers=PARENT))
    ended = time.time_ns()
    host.close()  # sends the last spans

    assert collector.services() == {"jaxllm"}
    spans = collector.requests()
    assert len(spans) == 5  # what is refused has never been a request
    plain, chatted, alone, aborted, mine = sorted(
        spans.values(), key=lambda span: span.start_time_unix_nano
    )
    for span in (plain, chatted, aborted, mine):
        assert span.trace_id.hex() == TRACE and span.parent_span_id.hex() == SPAN
        assert span.trace_state == "vendor=1"
    assert alone.trace_id.hex() != TRACE and not alone.parent_span_id
    for span in spans.values():
        assert span.kind == span.SPAN_KIND_SERVER
        assert began < span.start_time_unix_nano < span.end_time_unix_nano < ended

    said = attributes(plain)
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "tiny"
    assert said["gen_ai.usage.prompt_tokens"] == 8
    assert said["gen_ai.usage.completion_tokens"] == said["gen_ai.request.max_tokens"] == 6
    assert said["gen_ai.request.temperature"] == 0.5
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    e2e = said["gen_ai.latency.e2e"]
    assert 0 < said["gen_ai.latency.time_to_first_token"] < e2e
    in_model = said["gen_ai.latency.time_in_model_inference"]
    assert 0 < in_model < e2e
    parts = [said[f"gen_ai.latency.time_in_model_{part}"] for part in ("prefill", "decode")]
    assert sum(parts) == pytest.approx(in_model)

    assert attributes(chatted)["gen_ai.request.n"] == 2
    assert attributes(chatted)["gen_ai.response.finish_reasons"] == ["length"] * 2
    assert attributes(aborted)["gen_ai.response.finish_reasons"] == ["abort"]
    assert attributes(mine)["gen_ai.request.id"] == "mine"

    start = {span.name: span for span in collector.spans if span.name != "llm_request"}
    whole = start.pop("Overall Loading")
    assert set(start) == {"Plan", "Load weights", "Allocate KV cache"}
    for span in start.values():
        assert span.parent_span_id == whole.span_id
        assert whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= whole.end_time_unix_nano


async def generate(engine, request_id, **options):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    async for _ in engine.generate("Once", params, request_id, **options):
        pass


def test_a_batch_is_traced(engine_options):
    with HTTPCollector().running() as collector:
        llm = LLM(**traced(engine_options, collector))
        llm.generate(["a", "b"], SamplingParams(max_tokens=2), use_tqdm=False)
        llm.shutdown()
    models = {attributes(span)["gen_ai.request.model"] for span in collector.requests().values()}
    assert len(collector.requests()) == 2 and models == {llm.llm_engine.info.model}


def test_trace_headers_that_are_none_are_refused(host):
    for headers in ("traceparent", {"traceparent": 1}, {"traceparent": b""}):
        with pytest.raises(ValidationError, match="trace_headers=.*a dict of strings"):
            host.call(generate(host.engine, "r", trace_headers=headers))

"""Starts tracing if the config wants it, and checks that its packages are installed."""

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from jaxllm.config import EngineConfig
from jaxllm.errors import ValidationError, refused

if TYPE_CHECKING:
    from jaxllm.metrics.otel import RequestTracer

_SCHEMES = {"grpc": ("http", "https", "grpc"), "http/protobuf": ("http", "https")}


def start_tracing(config: EngineConfig) -> "RequestTracer | None":
    """Make the tracer that sends spans to a collector; None if the config has no collector."""
    options = config.observability
    endpoint = options.otlp_traces_endpoint
    if endpoint is None:
        return None
    url, schemes = urlsplit(endpoint), _SCHEMES[options.otlp_traces_protocol]
    if url.scheme not in schemes or not url.netloc:
        raise refused(
            "otlp_traces_endpoint",
            endpoint,
            f"give a URL with a host, such as http://localhost:4317, that begins with "
            f"{' or '.join(f'{scheme}://' for scheme in schemes)}",
        )
    try:
        from jaxllm.metrics.otel import RequestTracer, make_exporter

        exporter = make_exporter(endpoint, options.otlp_traces_protocol)
    except ModuleNotFoundError as error:
        raise ValidationError(
            f"otlp_traces_endpoint needs {error.name}; install it with pip install 'jaxllm[otel]'",
            parameter="otlp_traces_endpoint",
            value=endpoint,
        ) from error
    return RequestTracer(exporter, endpoint, config.model.model)

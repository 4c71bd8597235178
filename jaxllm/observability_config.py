"""Options of tracing, profiles and signs of life, a part of `EngineConfig`."""

from dataclasses import dataclass
from typing import Literal

from jaxllm.option_types import option


@dataclass(frozen=True, kw_only=True)
class ObservabilityConfig:
    """Tracing and figures"""

    otlp_traces_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry collector that gets a span for every request, such as "
        "http://localhost:4317; needs 'jaxllm[otel]'.",
    )
    otlp_traces_protocol: Literal["grpc", "http/protobuf"] = option(
        "grpc", "What it speaks there; collectors listen at 4317 for the one, 4318 for the other."
    )
    count_expert_tokens: bool = option(
        False, "Count the tokens of each expert of each layer, for /metrics."
    )


@dataclass(frozen=True, kw_only=True)
class ProfilerConfig:
    """Profiles"""

    profile_dir: str | None = option(
        None,
        "Directory for profiles of the engine, which start_profile and stop_profile take; without "
        "one they are refused.",
    )


@dataclass(frozen=True, kw_only=True)
class LivenessConfig:
    """Signs of life, of servers and run-batch"""

    engine_iteration_timeout: float = option(
        300.0,
        "Seconds that a step may take before the engine is taken to hang, and ends; twelve times "
        "as long with enforce_eager, to sleep, to wake up and for profiles. 0 is no limit.",
    )
    engine_heartbeat_timeout: float = option(
        60.0,
        "Seconds without a sign of life after which a server kills the engine's process; twelve "
        "times as long while it starts. 0 is no limit, as for one in a debugger.",
    )

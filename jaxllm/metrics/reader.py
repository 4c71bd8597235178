"""The engine's statistics under public names, for `LLM.get_metrics`."""

import dataclasses
from dataclasses import dataclass

from jaxllm.metrics.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure."""

    name: str
    value: float


class Counter(Metric):
    """A total that only grows."""


class Gauge(Metric):
    """A state as of now."""


_PREFIX = "jaxllm:"
_GAUGES = {
    "num_requests_running",
    "num_requests_waiting",
    "num_blocks",
    "num_blocks_used",
    "overlap",
}
_DERIVED = (
    "kv_cache_usage",
    "prefix_cache_hit_rate",
    "padding_waste",
    "pipeline_bubble_share",
    "host_us_per_step",
)


def read_metrics(stats: EngineStats) -> list[Metric]:
    """Every field of the statistics as a Counter or Gauge, then the ratios made of them."""
    metrics: list[Metric] = []
    for field in dataclasses.fields(stats):
        kind = Gauge if field.name in _GAUGES else Counter
        metrics.append(kind(_PREFIX + field.name, float(getattr(stats, field.name))))
    return metrics + [Gauge(_PREFIX + name, getattr(stats, name)) for name in _DERIVED]

"""The engine's figures for `LLM.get_metrics`: those of /metrics, without a server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxllm.metrics.figures import EXPERT_TOKENS, FIGURES, STEP_TOKENS, step_tokens_buckets
from jaxllm.metrics.stats import EngineStats


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of one engine."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A total that only grows."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A state as of now."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """How many values were at most each of several limits."""

    count: int
    sum: float
    buckets: Mapping[str, int]


_PREFIX = "jaxllm:"
_KINDS = {"counter": Counter, "gauge": Gauge}


def read_metrics(replicas: Sequence[EngineStats], model: str) -> list[Metric]:
    """All figures of every replica. The label `engine` is the replica's number."""
    metrics: list[Metric] = []
    for number, stats in enumerate(replicas):
        labels = {"model_name": model, "engine": str(number)}
        for figure in FIGURES:
            kind = _KINDS[figure.kind]
            metrics.append(kind(_PREFIX + figure.name, labels | figure.labels, figure.read(stats)))
        for layer, counts in stats.expert_tokens.items():
            for expert, count in enumerate(counts):
                its = labels | {"layer": str(layer), "expert": str(expert)}
                metrics.append(Counter(_PREFIX + EXPERT_TOKENS, its, count))
        buckets = step_tokens_buckets(stats)
        metrics.append(
            Histogram(
                _PREFIX + STEP_TOKENS,
                labels,
                count=buckets["+Inf"],
                sum=stats.num_scheduled_tokens,
                buckets=buckets,
            )
        )
    return metrics

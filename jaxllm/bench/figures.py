"""Computes the statistics of a run from the outcome of each request, under vLLM's names."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

METRICS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token, without the first",
    "itl": "Time between pieces of an answer",
    "e2el": "Time to the end of the answer",
}


@dataclass(slots=True)
class Outcome:
    """The outcome of a request. Times are in seconds; `start` is relative to the run's start."""

    prompt_len: int
    start: float = 0.0
    output_len: int = 0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)  # between pieces of one or more tokens
    latency: float = 0.0  # to the last piece
    text: str = ""
    error: str = ""  # why it failed; empty if it succeeded

    @property
    def has_failed(self) -> bool:
        return self.error != ""

    @property
    def tpot(self) -> float | None:
        """Time per output token; None for an answer of one token, which has no interval."""
        if self.output_len < 2:
            return None
        return (self.latency - self.ttft) / (self.output_len - 1)


def figures(
    outcomes: Sequence[Outcome],
    duration: float,
    percentiles: Sequence[float],
    goals: Mapping[str, float],
) -> dict[str, Any]:
    """Compute the statistics of a run.

    Args:
      duration: seconds from the first request's start to the last one's end.
      goals: upper limits of a good request in milliseconds, by metric.
    """
    done = [outcome for outcome in outcomes if not outcome.has_failed]
    num_input = sum(outcome.prompt_len for outcome in done)
    num_output = sum(outcome.output_len for outcome in done)
    result: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration,
        "request_goodput": None,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "max_output_tokens_per_s": float(max(tokens_per_second(done), default=0.0)),
        "max_concurrent_requests": _most_at_once(outcomes),
        "error_counts": Counter(o.error for o in outcomes if o.has_failed),
    }
    if goals:
        result["request_goodput"] = sum(is_good(one, goals) for one in done) / duration
    for name, seconds in samples(done).items():
        result |= _distribution(name, np.array(seconds) * 1e3, percentiles)
    return result


def samples(done: Sequence[Outcome]) -> dict[str, list[float]]:
    """All measured values of each metric, in seconds."""
    return {
        "ttft": [outcome.ttft for outcome in done],
        "tpot": [tpot for outcome in done if (tpot := outcome.tpot) is not None],
        "itl": [seconds for outcome in done for seconds in outcome.itl],
        "e2el": [outcome.latency for outcome in done],
    }


def is_good(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    """Whether a request meets every goal."""
    ms = {
        "ttft": outcome.ttft * 1e3,
        "tpot": (outcome.tpot or 0.0) * 1e3,
        "e2el": outcome.latency * 1e3,
    }
    return not outcome.has_failed and all(ms[name] <= limit for name, limit in goals.items())


def tokens_per_second(done: Sequence[Outcome], interval: float = 1.0) -> np.ndarray:
    """Output tokens per second in each interval of the run; `interval` is in seconds. An answer's
    tokens are spread evenly over its pieces, because a piece does not say how many it has."""
    times: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    for one in done:
        if one.output_len:
            at = one.start + one.ttft + np.cumsum([0.0, *one.itl])
            times.append(at)
            weights.append(np.full(len(at), one.output_len / len(at)))
    if not times:
        return np.zeros(0)
    places = (np.concatenate(times) / interval).astype(int)
    return np.bincount(places, np.concatenate(weights)) / interval


def percentile_name(percentile: float) -> str:
    """A percentile's name: p99, p99.9."""
    return f"p{percentile:g}"


def _distribution(
    name: str, ms: np.ndarray, percentiles: Sequence[float]
) -> dict[str, float | None]:
    """Mean, median, standard deviation and percentiles; None if there are no values."""
    named = {
        "mean": np.mean,
        "median": np.median,
        "std": np.std,
        **{percentile_name(p): lambda x, p=p: np.percentile(x, p) for p in percentiles},
    }
    return {
        f"{kind}_{name}_ms": float(compute(ms)) if len(ms) else None
        for kind, compute in named.items()
    }


def _most_at_once(outcomes: Sequence[Outcome]) -> int:
    changes = [(one.start, 1) for one in outcomes]
    changes += [(one.start + one.latency, -1) for one in outcomes]
    most = running = 0
    for _, change in sorted(changes):
        running += change
        most = max(most, running)
    return most

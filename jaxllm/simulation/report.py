"""Summarises a simulation in the metrics that operators use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jaxllm.plural import counted
from jaxllm.simulation.simulator import Outcome
from jaxllm.simulation.trace import Trace

PERCENTILES = (50, 90, 99)
_MS = 1e3


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Metrics of one run. Times are in milliseconds: their mean, and percentiles by name."""

    num_replicas: int  # with autoscaling the most that there were
    num_replicas_mean: float
    num_chips: int
    completed: int
    refused: int
    duration: float  # seconds from the first arrival to the last token
    request_throughput: float
    output_throughput: float
    total_token_throughput: float
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    e2el_ms: dict[str, float]
    good_share: float | None  # the share of requests that met all goals
    kv_cache_usage_mean: float
    kv_cache_usage_max: float
    prefix_cache_hit_rate: float
    # Of the tokens that prompts did not find on the devices; None: the host keeps nothing.
    host_cache_hit_rate: float | None
    num_preemptions: int
    padding_waste: float
    device_busy_share: float
    cost: float | None  # of all chips for as long as their replicas were there
    cost_per_million_output_tokens: float | None


def summarize(
    trace: Trace,
    outcome: Outcome,
    *,
    chips_per_replica: int,
    goals_ms: Mapping[str, float],
    price_per_chip_hour: float | None,
) -> Summary:
    """Compute the metrics. `goals_ms` are upper limits of a request's "ttft", "tpot" and "e2el"."""
    served = ~np.isnan(outcome.finished_at)
    outputs = outcome.num_output_tokens[served]
    first = outcome.first_token_at[served] - trace.arrivals[served]
    whole = outcome.finished_at[served] - trace.arrivals[served]
    later = outputs > 1
    times = {
        "ttft": first * _MS,
        # An answer of one token has no time between tokens, and meets any goal for it.
        "tpot": np.where(later, (whole - first) / np.maximum(outputs - 1, 1), 0.0) * _MS,
        "e2el": whole * _MS,
    }
    good = np.ones(len(outputs), bool)
    for name, limit in goals_ms.items():
        good &= times[name] <= limit
    num_chips = outcome.max_replicas * chips_per_replica
    num_outputs, num_prompts = int(outputs.sum()), int(trace.num_prompt_tokens[served].sum())
    seconds = outcome.end or math.inf  # if no request was served, all rates are zero
    cost = None
    if price_per_chip_hour is not None:
        cost = price_per_chip_hour * chips_per_replica * outcome.replica_seconds / 3600
    return Summary(
        num_replicas=outcome.max_replicas,
        num_replicas_mean=outcome.replica_seconds / seconds,
        num_chips=num_chips,
        completed=int(served.sum()),
        refused=int((~served).sum()),
        duration=outcome.end,
        request_throughput=len(outputs) / seconds,
        output_throughput=num_outputs / seconds,
        total_token_throughput=(num_outputs + num_prompts) / seconds,
        ttft_ms=_figures(times["ttft"]),
        tpot_ms=_figures(times["tpot"][later]),
        e2el_ms=_figures(times["e2el"]),
        good_share=float(good.sum() / len(trace)) if goals_ms else None,
        kv_cache_usage_mean=outcome.kv_cache_usage_mean,
        kv_cache_usage_max=outcome.kv_cache_usage_max,
        prefix_cache_hit_rate=outcome.stats.prefix_cache_hit_rate,
        host_cache_hit_rate=outcome.stats.external_cache_hit_rate,
        num_preemptions=outcome.stats.num_preemptions,
        padding_waste=outcome.stats.padding_waste,
        device_busy_share=outcome.busy_share,
        cost=cost,
        cost_per_million_output_tokens=(
            None if cost is None or not num_outputs else cost / num_outputs * 1e6
        ),
    )


def as_text(name: str, summary: Summary) -> str:
    """Format a page about one run."""
    header = "".join(f"{f'p{p}':>12}" for p in PERCENTILES)
    lines = [
        f"{name}: {counted(summary.num_replicas, 'replica')} on "
        f"{counted(summary.num_chips, 'chip')} (simulated)",
        f"{counted(summary.completed, 'request')} in {summary.duration:,.1f} s, "
        f"{summary.refused} refused",
        f"{summary.request_throughput:,.2f} requests/s, {summary.output_throughput:,.0f} output "
        f"tokens/s, {summary.total_token_throughput:,.0f} tokens/s with prompts",
        "",
        f"{'ms':<22}{'mean':>12}{header}",
    ]
    for label, times in (
        ("first token", summary.ttft_ms),
        ("per token after it", summary.tpot_ms),
        ("whole answer", summary.e2el_ms),
    ):
        lines.append(f"{label:<22}" + "".join(f"{value:>12,.1f}" for value in times.values()))
    if summary.num_replicas_mean < summary.num_replicas - 0.005:
        lines += ["", f"{summary.num_replicas_mean:,.2f} replicas in the mean"]
    of_host = summary.host_cache_hit_rate
    lines += [
        "",
        f"KV cache in use: {summary.kv_cache_usage_mean:.1%} in the mean, at most "
        f"{summary.kv_cache_usage_max:.1%}; prefix hits {summary.prefix_cache_hit_rate:.1%}"
        + ("; " if of_host is None else f", {of_host:.1%} of what devices lacked on the host; ")
        + f"{summary.num_preemptions} preemptions",
        f"devices busy {summary.device_busy_share:.1%}, padding {summary.padding_waste:.1%} of "
        "token rows",
    ]
    if summary.good_share is not None:
        lines.append(f"as well served as asked for: {summary.good_share:.2%} of all requests")
    if summary.cost is not None:
        per_million = summary.cost_per_million_output_tokens
        shown = "-" if per_million is None else f"{per_million:,.3f}"
        lines.append(f"cost {summary.cost:,.2f}, {shown} per million output tokens")
    return "\n".join(lines)


def _figures(times: np.ndarray) -> dict[str, float]:
    if not len(times):
        return {"mean": 0.0, **{f"p{p}": 0.0 for p in PERCENTILES}}
    values = np.percentile(times, PERCENTILES)
    return {
        "mean": float(times.mean()),
        **{f"p{p}": float(v) for p, v in zip(PERCENTILES, values, strict=True)},
    }

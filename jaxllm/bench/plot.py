"""The chart of a run: latencies of tokens, and tokens over time."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxllm.bench.figures import METRICS, Outcome, samples, tokens_per_second
from jaxllm.bench.svg import Chart, Line, Mark, draw

# More points per curve would not be visible.
_POINTS = 200
_MARKED = (50, 99)
_INTERVALS = 50  # of the run; tokens are counted in each


def plot(path: str, outcomes: Sequence[Outcome]) -> None:
    """Write the charts as SVG."""
    done = [outcome for outcome in outcomes if not outcome.has_failed]
    measured = samples(done)
    charts = [_cumulative(name, measured[name]) for name in ("ttft", "itl")]
    charts.append(_over_time(done))
    charts.append(_ttft_over_time(done))
    Path(path).write_text(draw(charts), encoding="utf-8")


def _cumulative(name: str, seconds: Sequence[float]) -> Chart:
    """The cumulative distribution of the values."""
    percents = np.linspace(0, 100, _POINTS)
    ms = np.percentile(np.array(seconds) * 1e3, percents) if seconds else np.zeros(_POINTS)
    marks = [Mark(f"p{p}", float(np.percentile(ms, p))) for p in _MARKED]
    line = Line(name, ms.tolist(), percents.tolist())
    return Chart(METRICS[name], "milliseconds", "percent at most", [line], marks)


def _over_time(done: Sequence[Outcome]) -> Chart:
    end = max((one.start + one.latency for one in done), default=1.0)
    interval = end / _INTERVALS
    tokens = tokens_per_second(done, interval)
    line = Line("tokens", ((np.arange(len(tokens)) + 0.5) * interval).tolist(), tokens.tolist())
    return Chart("Output tokens", "second of the run", "tokens per second", [line])


def _ttft_over_time(done: Sequence[Outcome]) -> Chart:
    ordered = sorted(done, key=lambda outcome: outcome.start)
    line = Line("ttft", [one.start for one in ordered], [one.ttft * 1e3 for one in ordered])
    return Chart(METRICS["ttft"], "second of the run", "milliseconds", [line])

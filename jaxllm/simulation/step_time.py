"""The time of a step: from the roofline of a plan, or from measurements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxllm.plan.buckets import Bucket
from jaxllm.programs.roofline import Roofline
from jaxllm.scheduler.schedule import Schedule


class StepTime(Protocol):
    """A model of a replica's devices."""

    @property
    def num_stages(self) -> int: ...

    def seconds(self, bucket: Bucket, schedule: Schedule) -> Sequence[float]:
        """The time of each stage, for a step that runs as this program."""
        ...


@dataclass(frozen=True, kw_only=True)
class RooflineTime:
    """The bound of each stage divided by an efficiency, plus a constant for the launch.

    Matrices also multiply a program's padding; attention computes only the actual tokens.
    """

    stages: tuple[Roofline, ...]
    efficiency: float
    launch_s: float = 0.0

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    def seconds(self, bucket: Bucket, schedule: Schedule) -> list[float]:
        times = []
        for stage in self.stages:
            num_bytes, num_flops = stage.attention(schedule.num_tokens, schedule.context_lens)
            bound = stage.bound(
                bucket.num_tokens, bucket.num_rows, (float(num_bytes.sum()), float(num_flops.sum()))
            )
            times.append(self.launch_s + bound.seconds / self.efficiency)
        return times


def attended_tokens(schedule: Schedule) -> int:
    """The number of pairs of a token of the step and a token that it sees. The cost of attention is
    proportional to it."""
    tokens = schedule.num_tokens.astype(np.int64)
    return int((tokens * schedule.context_lens - tokens * (tokens - 1) // 2).sum())


@dataclass(frozen=True, kw_only=True)
class Line:
    """The measured times of one program, as a linear function of attended tokens."""

    base_s: float
    per_attended_s: float


@dataclass(frozen=True, kw_only=True)
class MeasuredTime:
    """Steps of an engine without a pipeline, from `measure`."""

    lines: Mapping[Bucket, Line]

    num_stages: int = 1

    def seconds(self, bucket: Bucket, schedule: Schedule) -> list[float]:
        line = self.lines[bucket]
        return [line.base_s + line.per_attended_s * attended_tokens(schedule)]


def fit_line(attended: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit a non-decreasing line to the measured times of one program.

    The slope is the median over pairs (Theil-Sen), so single slow steps have little influence.
    """
    x, y = np.asarray(attended, float), np.asarray(seconds, float)
    first, second = np.triu_indices(len(x), k=1)
    apart = x[first] != x[second]
    first, second = first[apart], second[apart]
    slopes = (y[second] - y[first]) / (x[second] - x[first])
    slope = max(0.0, float(np.median(slopes))) if len(slopes) else 0.0
    return Line(base_s=max(0.0, float(np.median(y - slope * x))), per_attended_s=slope)

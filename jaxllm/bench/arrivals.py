"""When requests are sent."""

import math
from typing import Literal

import numpy as np


def arrival_times(
    num_requests: int, rate: float, burstiness: float, rng: np.random.Generator
) -> np.ndarray:
    """Seconds from the start at which requests are sent, at this mean rate.

    The times between them are gamma-distributed with shape `burstiness`; with 1 that is a Poisson
    process. They are scaled so that the last request comes at num_requests / rate exactly: the rate
    is what was asked for, and runs compare. (A Poisson process stays one, of which it is known how
    many requests come in that time.)
    """
    if math.isinf(rate):
        return np.zeros(num_requests)
    times = np.cumsum(rng.gamma(burstiness, size=num_requests))
    return times * (num_requests / rate / times[-1])


def ramp_times(
    num_requests: int,
    strategy: Literal["linear", "exponential"],
    start_rate: float,
    end_rate: float,
    burstiness: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """The same with a rate that goes from one to the other, request by request."""
    progress = np.arange(num_requests) / max(num_requests - 1, 1)
    if strategy == "linear":
        rates = start_rate + (end_rate - start_rate) * progress
    else:
        rates = start_rate * (end_rate / start_rate) ** progress
    return np.cumsum(rng.gamma(burstiness, size=num_requests) / (burstiness * rates))

"""The times at which requests are sent."""

import math
from typing import Literal

import numpy as np


def arrival_times(
    num_requests: int, rate: float, burstiness: float, rng: np.random.Generator
) -> np.ndarray:
    """Times from the start, in seconds, at which requests are sent at this mean rate.

    The intervals are gamma-distributed with shape `burstiness`; a shape of 1 is a Poisson process.
    They are scaled so that the last request comes at num_requests / rate exactly. So runs have
    exactly the given rate and can be compared. (This is a Poisson process conditioned on the number
    of requests in that time.)
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
    """Times for a rate that changes from `start_rate` to `end_rate`, request by request."""
    progress = np.arange(num_requests) / max(num_requests - 1, 1)
    if strategy == "linear":
        rates = start_rate + (end_rate - start_rate) * progress
    else:
        rates = start_rate * (end_rate / start_rate) ** progress
    return np.cumsum(rng.gamma(burstiness, size=num_requests) / (burstiness * rates))

"""A histogram that costs little to fill: Prometheus gets its form when it asks."""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.utils import floatToGoString


class Histogram:
    """How many values lie between which bounds, and their sum; for one thread."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        """A value that equals a bound lies below it."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """How many values are at most as large as each bound, by the bound as Prometheus writes
        it; the last one is infinite."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), float(total)))
        return buckets

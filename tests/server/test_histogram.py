"""Our histogram is read as prometheus_client's own."""

import random

from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as TheirHistogram

from jaxllm.server.histogram import Histogram

BOUNDS = (0.001, 0.5, 1, 20, 10_000)


def test_it_counts_as_the_one_of_prometheus_client():
    registry = CollectorRegistry(auto_describe=False)
    ours, theirs = Histogram(BOUNDS), TheirHistogram("x", "x", buckets=BOUNDS, registry=registry)
    rng = random.Random(0)
    for value in (*BOUNDS, 0, 1e9, *(10 ** rng.uniform(-4, 5) for _ in range(200))):
        times = rng.randint(1, 4)
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    (family,) = registry.collect()
    samples = {one.labels.get("le", one.name): one.value for one in family.samples}
    for bound, count in ours.buckets():
        assert samples.pop(bound) == count
    assert samples["x_count"] == ours.buckets()[-1][1]
    assert abs(samples["x_sum"] - ours.sum) <= 1e-9 * ours.sum

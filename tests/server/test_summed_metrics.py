"""Figures of several frontends add up as if one had counted them."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from jaxllm.server.summed_metrics import added, report


class Frontend:
    def __init__(self):
        self.registry = CollectorRegistry()
        self.ended = Counter("ended", "Ends.", ["reason"], registry=self.registry)
        self.seconds = Histogram("seconds", "Times.", buckets=(1, 2), registry=self.registry)

    def collect(self):
        return self.registry.collect()


class Page:
    def __init__(self, families):
        self._families = families

    def collect(self):
        return self._families


def lines_of(collector):
    """Without when they were made."""
    page = generate_latest(collector).decode()
    return sorted(line for line in page.splitlines() if "_created" not in line)


def test_counters_and_histograms_are_added_up():
    first, second, third, one_for_all = (Frontend() for _ in range(4))
    for frontends, reason, seconds in (
        ((first, one_for_all), "stop", 0.5),
        ((second, one_for_all), "stop", 1.5),
        ((second, one_for_all), "length", 9),
        ((third, one_for_all), "abort", 0.1),
    ):
        for frontend in frontends:
            frontend.ended.labels(reason).inc()
            frontend.seconds.observe(seconds)
    reports = [report(other.collect()) for other in (second, third)]
    assert lines_of(Page(added(first.collect(), reports))) == lines_of(one_for_all)


def test_a_gauge_is_of_who_is_asked():
    registry = CollectorRegistry()
    Gauge("size", "Of it.", registry=registry).set(3)
    (family,) = added(registry.collect(), [report(registry.collect())])
    assert [sample.value for sample in family.samples] == [3]

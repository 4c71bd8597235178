"""Adds up the metrics of all frontends."""

from collections.abc import Iterable, Sequence

import msgspec
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

# Counts can be added up; a gauge cannot, so the frontend that is asked reports its own.
_ADDED = ("counter", "histogram", "summary")


class _Sample(msgspec.Struct, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class _Family(msgspec.Struct, array_like=True):
    name: str
    text: str
    kind: str
    samples: list[_Sample]


_DECODER = msgspec.msgpack.Decoder(list[_Family])


def report(families: Iterable[Metric]) -> bytes:
    """Encode the counts of one frontend for another frontend."""
    return msgspec.msgpack.encode(
        [
            _Family(
                family.name,
                family.documentation,
                family.type,
                [_Sample(one.name, dict(one.labels), one.value) for one in family.samples],
            )
            for family in families
            if family.type in _ADDED
        ]
    )


def added(families: Iterable[Metric], reports: Sequence[bytes]) -> list[Metric]:
    """Add the reports of other frontends to these metrics."""
    totals = {family.name: family for family in families}
    for one in reports:
        for family in _DECODER.decode(one):
            total = totals.setdefault(family.name, Metric(family.name, family.text, family.kind))
            _add(total, family.samples)
    return list(totals.values())


def _add(total: Metric, samples: Sequence[_Sample]) -> None:
    places = {_key(sample): place for place, sample in enumerate(total.samples)}
    for sample in samples:
        place = places.get(_key(sample))
        if place is None:  # a new combination of labels
            total.samples.append(Sample(sample.name, sample.labels, sample.value))
        else:
            mine = total.samples[place]
            total.samples[place] = mine._replace(value=mine.value + sample.value)


def _key(sample: Sample | _Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())

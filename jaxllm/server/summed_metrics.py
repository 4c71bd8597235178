"""Figures that each frontend keeps for itself, as of all of them together."""

from collections.abc import Iterable, Sequence

import msgspec
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

# What has been counted can be added up; a gauge is of whoever is asked.
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
    """What one frontend has counted, for another one."""
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
    """These figures, with what the others report added to them."""
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
        if place is None:  # of labels that have not been seen here
            total.samples.append(Sample(sample.name, sample.labels, sample.value))
        else:
            mine = total.samples[place]
            total.samples[place] = mine._replace(value=mine.value + sample.value)


def _key(sample: Sample | _Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return sample.name, frozenset(sample.labels.items())

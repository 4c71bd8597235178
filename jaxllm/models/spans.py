"""Sources of rows of any other source: of a tensor, or of what codes stand for."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from jaxllm.models.checkpoint_map import Box, Concat, Rows, Shape, Source, Tensors


@dataclass(frozen=True)
class Span:
    """Rows `first` up to `end` of a source, which `Beside` names."""

    source: Source
    first: int
    end: int

    @property
    def shape(self) -> Shape:
        return (self.end - self.first, *self.source.shape[1:])

    def rows(self) -> Iterator[Rows]:
        return iter(())

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        rows = slice(box[0].start + self.first, box[0].stop + self.first)
        self.source.copy(tensors, (rows, *box[1:]), target)


@dataclass(frozen=True)
class Beside:
    """A source that names the tensors of another one: all of its spans."""

    source: Source
    whole: Source

    @property
    def shape(self) -> Shape:
        return self.source.shape

    def rows(self) -> Iterator[Rows]:
        yield from self.source.rows()
        yield from self.whole.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        self.source.copy(tensors, box, target)


def in_spans(whole: Source, spans: Iterable[tuple[int, int]]) -> Beside:
    """All rows of a source in another order: from a first row up to an end, span after span."""
    source = Beside(Concat(tuple(Span(whole, first, end) for first, end in spans)), whole)
    assert source.shape == whole.shape, f"{source.shape} of the rows of {whole.shape}"
    return source

"""Sources of what codes stand for, and of scales that many outputs share."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxllm_kernels.coded import TABLES, CodeForm

from jaxllm.models.checkpoint_map import Box, Rows, Shape, Source, Tensors


@dataclass(frozen=True)
class Spread:
    """Rows of scales [n, groups], each repeated for the outputs that share it."""

    source: Source
    each: int  # outputs of a row; the last one may have fewer
    num_outputs: int

    @property
    def shape(self) -> Shape:
        return (self.num_outputs, self.source.shape[1])

    def rows(self) -> Iterator[Rows]:
        return self.source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        outputs, groups = box
        first, end = outputs.start // self.each, -(-outputs.stop // self.each)
        held = np.empty((end - first, target.shape[1]), target.dtype)
        self.source.copy(tensors, (slice(first, end), groups), held)
        target[...] = held[np.arange(outputs.start, outputs.stop) // self.each - first]


@dataclass(frozen=True)
class Values:
    """The weights [out, in] that numbers of codes stand for."""

    form: CodeForm
    codes: Source
    scales: Source
    offsets: Source | None

    @property
    def shape(self) -> Shape:
        return self.codes.shape

    def rows(self) -> Iterator[Rows]:
        for source in (self.codes, self.scales, self.offsets):
            if source is not None:
                yield from source.rows()

    def copy(self, tensors: Tensors, box: Box, target: np.ndarray) -> None:
        outputs, inputs = box
        codes = np.empty(target.shape, self.form.code_dtype)
        self.codes.copy(tensors, box, codes)
        is_number = self.form.bits == 4
        wide = np.array(TABLES[self.form.codes], np.float32)[codes] if is_number else codes
        group = self.form.group or self.shape[1]
        first, end = inputs.start // group, -(-inputs.stop // group)
        columns = np.arange(inputs.start, inputs.stop) // group - first

        def of_inputs(source: Source) -> np.ndarray:
            held = np.empty((target.shape[0], end - first), np.float32)
            source.copy(tensors, (outputs, slice(first, end)), held)
            return held[:, columns]

        values = wide.astype(np.float32) * of_inputs(self.scales)
        target[...] = values if self.offsets is None else values + of_inputs(self.offsets)
